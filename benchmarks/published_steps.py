"""Estimated training throughput beside published ones, with torch's kernels and with fused ones.

Nothing is computed: models are on `meta`, steps are store-all's, estimated for the GPU on which
others have measured. To the estimated step the time is added in which a fused AdamW reads and
writes its seven tensors a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import memopt
from benchmarks.runner import Benchmark, Line, named
from benchmarks.shapes import gpt2_of, llama
from memopt.models.device import Device
from memopt.models.presets import find_device

_ADAMW_TENSORS = 7
"""Parameter, both moments and gradient are read, all but the gradient written."""
RASCHKA = (
    "[Raschka](https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/10_llm-training-speed)"
)
LLM_C = "[llm.c, PR 323](https://github.com/karpathy/llm.c/pull/323)"
TORCHTITAN = (
    "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md)"
)


@dataclass(frozen=True)
class Published:
    """A throughput that somebody measured of eager ("aten") or of `torch.compile` ("compiled"); the
    source is a link, `model` makes it for a vocabulary."""

    what: str
    source: str
    device: Device
    kernels: str
    model: Callable[[int], nn.Module]
    vocabulary: int
    batch: int
    sequence: int
    tokens_per_s: float


def _gpt2(dropout: float, *, tied: bool) -> Callable[[int], nn.Module]:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    changes = {"activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": tied, **rates}
    return lambda vocabulary: gpt2_of(vocab_size=vocabulary, **changes)


def _llama(vocabulary: int) -> nn.Module:
    return llama("llama-3-8b", vocab_size=vocabulary)


A100 = find_device("A100")
A100_PCIE = replace(A100, name="A100-PCIe-40GB", memory_bytes_per_s=1555e9)
# Sharded over eight there, hence the capacity.
_HBM2E = {"name": "H100-96GB-HBM2e", "memory_bytes_per_s": 2400e9, "capacity_bytes": 2**40}
H100_HBM2E = replace(find_device("H100"), **_HBM2E)  # type: ignore[arg-type]
_LARGE, _SMALL = "Llama 3.1 8B, 2 x 8192, bf16", "GPT-2 124M, {} x 1024, bf16"
_PADDED = "GPT-2 124M, 8 x 1024, bf16, vocabulary padded to 50,304"
_untied = _gpt2(0.1, tied=False)
# fmt: off
PUBLISHED: dict[str, Published] = {
    "raschka-eager": Published(
        _SMALL.format(8), RASCHKA, A100, "aten", _untied, 50257, 8, 1024, 91_901),
    "raschka": Published(
        _SMALL.format(8), RASCHKA, A100, "compiled", _untied, 50257, 8, 1024, 112_046),
    "raschka-padded": Published(
        _PADDED, RASCHKA, A100, "compiled", _untied, 50304, 8, 1024, 127_345),
    "raschka-large": Published(
        f"{_SMALL.format(32)}, padded", RASCHKA, A100, "compiled", _untied, 50304, 32, 1024,
        142_156),
    "llm.c": Published(
        _SMALL.format(32), LLM_C, A100_PCIE, "compiled", _gpt2(0.0, tied=True), 50257, 32, 1024,
        118_000),
    "torchtitan-eager": Published(
        _LARGE, TORCHTITAN, H100_HBM2E, "aten", _llama, 128256, 2, 8192, 5_762),
    "torchtitan": Published(
        _LARGE, TORCHTITAN, H100_HBM2E, "compiled", _llama, 128256, 2, 8192, 6_667),
}
# fmt: on


class _NextToken(nn.Module):
    """A language model and its loss, in the dtype of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _estimated(_: Any, name: str) -> list[Line]:
    """Estimate a step and its AdamW, on the device of the published figure."""
    one = PUBLISHED[name]
    with torch.device("meta"):
        model = one.model(one.vocabulary).to(torch.bfloat16).train()
        tokens = torch.zeros(one.batch, one.sequence, dtype=torch.long)
    how = {"strategy": "store-all", "mode": "estimate", "device": one.device, "progress": False}
    plan = memopt.plan(_NextToken(model), (tokens, tokens), kernels=one.kernels, **how)
    moved = _ADAMW_TENSORS * sum(p.nbytes for p in model.parameters())
    rate = one.device.memory_bytes_per_s * one.device.memory_fraction
    found = one.batch * one.sequence / (plan.step_time_s + moved / rate)
    figures = f"{one.tokens_per_s:,.0f} | {found:,.0f} | {found / one.tokens_per_s:.2f}"
    text = f"{one.what} ({one.source}) | {one.device.name} | `{one.kernels}` | {figures}"
    return [Line(text)]


BENCHMARK = Benchmark(
    cases=named(tuple(PUBLISHED)),
    measure=_estimated,
    head="step | GPU | kernels | published, tokens/s | estimated, tokens/s | estimated / published",
)
