"""The training steps that OLLA's benchmarks plan: full size, captured under fake tensors.

    python -m benchmarks.olla_graphs --folder FOLDER [NAME ...] [--batches 1 32]

captures them into FOLDER, so that a later run of olla_tables or olla_programs reads them there.
A step is forward + loss + backward + one update of every parameter (plain SGD, which works in
place), as `memopt.plan(model, inputs, loss_fn=..., optimizer=...)` captures it; batch 1 and 32,
images 224 pixels, text 512 tokens. Times and workspaces are estimated for the paper's GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.models.graph import Graph, Phase
from memopt.models.presets import find_device
from memopt.profiler.baseline import Loss
from memopt.profiler.estimate import estimate_costs
from memopt.profiler.inputs import to_call
from memopt.profiler.measure import with_costs
from memopt.profiler.step_capture import capture_step, with_updates
from memopt.programs.serialize import dumps, loads
from tests import zoo
from tests.zoo.language import logits_loss, make_xlm_r, tokens

DEVICE = "A100"
"""The GPU of OLLA §5.1 (there with 40 GB)."""

NAMES = (
    "resnet50", "vgg16", "googlenet", "mobilenet_v2", "densenet121", "efficientnet_b0",
    "inception_v3", "vit_b_16", "r3d_18", "unet", "mlp", "gpt2", "gpt2_no_dropout", "bert",
    "bert_no_dropout", "llama",
)  # fmt: skip
"""The sixteen model graphs: fourteen families, GPT-2 and BERT with and without dropout."""

PAPER_NAMES = ("alexnet", "mnasnet", "xlm_r_large")
"""Models of the paper that are not among them."""


def _xlm_r_large(size: zoo.Size) -> torch.nn.Module:
    """The 24-layer encoder, with about as many operators as the paper's XLM-R (2,007)."""
    if size == "tiny":
        return make_xlm_r(size)
    config = transformers.XLMRobertaConfig(
        vocab_size=250002, max_position_embeddings=514, type_vocab_size=1, hidden_size=1024,
        num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.XLMRobertaForMaskedLM(config).train()


def family_of(name: str) -> zoo.Family:
    """A family of the zoo, or the large XLM-R."""
    if name == "xlm_r_large":
        return zoo.Family(name, _xlm_r_large, tokens(True), logits_loss)
    return zoo.get(name)


def captured(family: zoo.Family, batch: int) -> Graph:
    """The priced graph of one training step at full size; nothing is computed."""
    device = find_device(DEVICE)
    with torch.device("meta"):
        model = family.build("paper")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        call = to_call(family.inputs("paper", batch=batch))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = capture_step(model, call, Loss(family.loss), optimizer, device.block_bytes)
        priced = with_costs(parts.lowering, estimate_costs(parts.lowering, device))
        _, whole = with_updates(parts, parts.lowering, {})
    updates = [x for x in whole.graph.operators if x.phase is Phase.UPDATE]
    return replace(priced, operators=(*priced.operators, *updates), gradients=whole.graph.gradients)


def graph_of(name: str, batch: int, folder: Path | None) -> Graph:
    """The captured graph, from the folder if it is there, else into it."""
    if folder is None:
        return captured(family_of(name), batch)
    path = folder / f"{name}-b{batch}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dumps(captured(family_of(name), batch)))
    graph = loads(path.read_bytes())
    assert isinstance(graph, Graph)
    return graph


def main() -> None:
    """Capture, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=(*NAMES, *PAPER_NAMES))
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 32))
    parser.add_argument("--folder", type=Path, default=Path("out/olla-graphs"))
    options = parser.parse_args()
    for name in options.names:
        for batch in options.batches:
            began = time.perf_counter()
            graph = graph_of(name, batch, options.folder)
            seconds = time.perf_counter() - began
            sys.stdout.write(f"{name} b{batch}: {len(graph.operators)} ops, {seconds:.1f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
