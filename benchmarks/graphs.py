"""Captured steps of the zoo's models at their published sizes, priced and kept in out/graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from benchmarks.shapes import WithLoss
from benchmarks.table import captured
from memopt.kernels import with_implementations
from memopt.models.chain import Chain, Stage
from memopt.models.device import Device
from memopt.models.graph import Graph, Phase
from memopt.models.presets import find_device
from memopt.pricing.measure import with_costs
from memopt.pricing.roofline import estimate_costs
from memopt.profiler.estimate import estimate_model
from memopt.profiler.step_capture import capture_step, with_updates
from memopt.reductions.linearize import linearize
from memopt.step.inputs import to_call
from memopt.step.loss import Loss
from tests import zoo
from tests.zoo.family import class_loss
from tests.zoo.language import logits_loss, make_xlm_r, tokens

FOLDER = Path("out/graphs")
BATCH = 32
"""Of `step_graph`."""
LOSS = "+loss"
V100, ROTOR_BATCH = find_device("V100-PCIe"), 8
"""Of `chain_of`: the GPU of Rotor's and Offloading's experiments, the largest batch of Rotor's."""
A100 = find_device("A100")
"""Of `updated_graph`: the GPU of OLLA §5.1 (there with 40 GB)."""


def step_graph(name: str, device: Device) -> Graph:
    """Capture a model's step with its exact implementations, BATCH examples, priced for a device.
    "NAME+loss": with its loss inside, so that the logits are the plan's to free."""

    def make() -> Graph:
        family = zoo.get(name.removesuffix(LOSS))
        with torch.device("meta"):
            model = family.build("paper")
        if name.endswith(LOSS):
            model = WithLoss(model, family.loss)
        profiled = estimate_model(model, family.inputs("paper", batch=BATCH), device)
        return with_implementations(profiled, exact_only=True, device=device).graph

    return captured(FOLDER / f"{device.name}-{name}-b{BATCH}-exact.json", Graph, make)


def chain_of(name: str, pixels: int, batch: int = ROTOR_BATCH) -> Chain:
    """Capture the chain of a model's step of square images, estimated for the V100."""

    def make() -> Chain:
        family = family_of(name)
        with torch.device("meta"):
            model = family.build("paper")
        images = torch.zeros(batch, 3, pixels, pixels)
        graph = memopt.profile(model, images, device=V100, mode="estimate", progress=False)
        return linearize(graph).chain

    return captured(FOLDER / f"chain-{name}-{pixels}-b{batch}.json", Chain, make)


def synthetic_chain(layers: int, seed: int = 0) -> Chain:
    """Draw a chain like a ResNet's, and a loss that costs nothing: sizes fall by a factor 8 from
    the first stage to the last, times and ā vary at random."""
    draw = np.random.default_rng(seed)
    stages = []
    for i in range(layers):
        scale = 2.0 ** -(3 * i // layers)
        output = int(1e6 * scale * draw.choice([1, 1, 1, 2]))
        stages.append(
            Stage(
                forward_time_s=float(draw.uniform(0.5, 1.5)),
                backward_time_s=float(draw.uniform(1, 3)),
                output_bytes=output,
                saved_bytes=int(output * draw.uniform(2, 5)),
                gradient_bytes=output,
                forward_overhead_bytes=int(output * draw.uniform(0, 1)),
                backward_overhead_bytes=int(output * draw.uniform(0, 2)),
                parameter_gradient_bytes=int(1e4 / scale),
            )
        )
    return Chain(500_000, [*stages, Stage(0.0, 0.0, 0, 0, 0)], resident_bytes=10**7)


def _xlm_r_large(size: zoo.Size) -> torch.nn.Module:
    """Build the 24-layer encoder, with about as many operators as the paper's XLM-R (2,007)."""
    if size == "tiny":
        return make_xlm_r(size)
    import transformers

    config = transformers.XLMRobertaConfig(
        vocab_size=250002, max_position_embeddings=514, type_vocab_size=1, hidden_size=1024,
        num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.XLMRobertaForMaskedLM(config).train()


class _Transformer(torch.nn.Module):
    """Vaswani et al., 2017, the base model: words (batch, length) in, logits of the next ones out;
    the sentence to translate is the same one."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(512, width)
        self.layers = torch.nn.Transformer(
            width, heads, layers, layers, 4 * width, 0.1, batch_first=True
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.layers(x, x, tgt_mask=later, tgt_is_causal=True) @ self.words.weight.T


def _transformer(size: zoo.Size) -> torch.nn.Module:
    return _Transformer(*((128, 64, 4, 2) if size == "tiny" else (37000, 512, 8, 6)))


def _resnet200(_: zoo.Size) -> torch.nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [3, 24, 36, 3])


def family_of(name: str) -> zoo.Family:
    """Find a family of the zoo, or of the papers: the large XLM-R, ResNet-200, the Transformer."""
    if name == "xlm_r_large":
        return zoo.Family(name, _xlm_r_large, tokens(True), logits_loss)
    if name == "resnet200":
        return replace(zoo.get("resnet152"), name=name, make=_resnet200)
    if name == "transformer":
        return zoo.Family(name, _transformer, tokens(False), class_loss)
    return zoo.get(name)


def updated_graph(name: str, batch: int) -> Graph:
    """Capture a training step, forward, loss, backward and an update of every parameter (plain SGD,
    which works in place), priced for the A100; nothing is computed."""

    def make() -> Graph:
        family = family_of(name)
        with torch.device("meta"):
            model = family.build("paper")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = model.to_empty(device="cpu")
            call = to_call(family.inputs("paper", batch=batch))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            parts = capture_step(model, call, Loss(family.loss), optimizer, A100.block_bytes)
            priced = with_costs(parts.lowering, estimate_costs(parts.lowering, A100))
            _, whole = with_updates(parts, parts.lowering, {})
        updates = [x for x in whole.graph.operators if x.phase is Phase.UPDATE]
        operators = (*priced.operators, *updates)
        return replace(priced, operators=operators, gradients=whole.graph.gradients)

    return captured(FOLDER / f"updated-{name}-b{batch}.json", Graph, make)
