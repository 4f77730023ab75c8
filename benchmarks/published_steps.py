"""Estimated training throughput beside published ones, with torch's kernels and with fused ones.

    python -m benchmarks.published_steps [--only NAME ...] [--out docs/kernels.md]

Nothing is computed: models are on `meta`, steps are store-all's, estimated for the GPU on which
others have measured. To the estimated step the time is added in which a fused AdamW reads and
writes its seven tensors a parameter. With --out the table replaces what is between the markers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import memopt
from benchmarks.llamas import llama
from memopt.models.device import Device
from memopt.models.presets import find_device
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

BEGIN, END = "<!-- published_steps: begin -->", "<!-- published_steps: end -->"
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
    """A throughput that somebody measured.

    Attributes:
        what: model, batch and dtype.
        source: where it stands, as a link.
        model: makes the model, on the device of the context.
        batch, sequence, vocabulary: of the step.
        device: the GPU it was measured on.
        kernels: "aten" for eager, "compiled" for `torch.compile`.
        tokens_per_s: as published.
    """

    what: str
    source: str
    model: Callable[[int], nn.Module]
    batch: int
    sequence: int
    vocabulary: int
    device: Device
    kernels: str
    tokens_per_s: float


def _gpt2(dropout: float, *, tied: bool) -> Callable[[int], nn.Module]:
    def make(vocabulary: int) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        config = GPT2Config(
            vocab_size=vocabulary,
            use_cache=False,
            activation_function="gelu_pytorch_tanh",
            attn_implementation="sdpa",
            tie_word_embeddings=tied,
            **rates,
        )
        return GPT2LMHeadModel(config)

    return make


def _llama(vocabulary: int) -> nn.Module:
    return llama("llama-3-8b", vocab_size=vocabulary)


A100 = find_device("A100")
A100_PCIE = replace(A100, name="A100-PCIe-40GB", memory_bytes_per_s=1555e9)
H100_HBM2E = replace(
    find_device("H100"),
    name="H100-96GB-HBM2e",
    memory_bytes_per_s=2400e9,
    capacity_bytes=2**40,  # sharded over eight there
)

_SMALL = "GPT-2 124M, {batch} x 1024, bf16"
_small = partial(Published, sequence=1024, vocabulary=50257, device=A100, kernels="compiled")
_raschka = partial(_small, source=RASCHKA, model=_gpt2(0.1, tied=False))
_torchtitan = partial(
    Published,
    what="Llama 3.1 8B, 2 x 8192, bf16",
    source=TORCHTITAN,
    model=_llama,
    batch=2,
    sequence=8192,
    vocabulary=128256,
    device=H100_HBM2E,
)
PUBLISHED: dict[str, Published] = {
    "raschka-eager": _raschka(
        what=_SMALL.format(batch=8), batch=8, kernels="aten", tokens_per_s=91_901
    ),
    "raschka": _raschka(what=_SMALL.format(batch=8), batch=8, tokens_per_s=112_046),
    "raschka-padded": _raschka(
        what=_SMALL.format(batch=8) + ", vocabulary padded to 50,304",
        batch=8,
        vocabulary=50304,
        tokens_per_s=127_345,
    ),
    "raschka-large": _raschka(
        what=_SMALL.format(batch=32) + ", padded",
        batch=32,
        vocabulary=50304,
        tokens_per_s=142_156,
    ),
    "llm.c": _small(
        what=_SMALL.format(batch=32),
        source=LLM_C,
        model=_gpt2(0.0, tied=True),
        batch=32,
        device=A100_PCIE,
        tokens_per_s=118_000,
    ),
    "torchtitan-eager": _torchtitan(kernels="aten", tokens_per_s=5_762),
    "torchtitan": _torchtitan(kernels="compiled", tokens_per_s=6_667),
}


class _NextToken(nn.Module):
    """A language model and its loss, in the dtype of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def estimated_tokens_per_s(one: Published) -> float:
    """Of a step and its AdamW, on the device of the published figure."""
    with torch.device("meta"):
        model = one.model(one.vocabulary).to(torch.bfloat16).train()
        tokens = torch.zeros(one.batch, one.sequence, dtype=torch.long)
    plan = memopt.plan(
        _NextToken(model),
        (tokens, tokens),
        strategy="store-all",
        mode="estimate",
        device=one.device,
        kernels=one.kernels,
        progress=False,
    )
    moved = _ADAMW_TENSORS * sum(p.nbytes for p in model.parameters())
    rate = one.device.memory_bytes_per_s * one.device.memory_fraction
    return one.batch * one.sequence / (plan.step_time_s + moved / rate)


HEAD = (
    "| step | GPU | kernels | published, tokens/s | estimated, tokens/s | estimated / published |",
    "|---|---|---|---:|---:|---:|",
)


def row(one: Published) -> str:
    """A line of the table."""
    found = estimated_tokens_per_s(one)
    return (
        f"| {one.what} ({one.source}) | {one.device.name} | `{one.kernels}` "
        f"| {one.tokens_per_s:,.0f} | {found:,.0f} | {found / one.tokens_per_s:.2f} |"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PUBLISHED), default=tuple(PUBLISHED))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = list(HEAD)
    print("\n".join(HEAD), flush=True)
    for name in options.only:
        lines.append(row(PUBLISHED[name]))
        print(lines[-1], flush=True)
    if options.out:
        page = options.out.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join(lines)
        options.out.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
