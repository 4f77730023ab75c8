"""Popular architectures of transformers and timm, small, all else by default, in `memopt.wrap`.

    python -m benchmarks.trainer_architectures [--only NAME ...] [--jobs 2]
                                               [--out docs/results/trainer_architectures.md]

Each trains twice from the same weights, plain and wrapped with the budget "min": two steps, and one
of two accumulated micro-batches. Losses, gradients, buffers and parameters have to be equal bit for
bit, and all four calls have to run under a plan. A model that is refused is shown with the
refusal's sentence, and trains again with what remedies it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import memopt
from benchmarks.architectures import ARCHITECTURES, Architecture
from memopt.errors import MemoptError
from tests.zoo import torchvision_shim  # noqa: F401 (before timm)

import timm  # isort: skip

STEPS = (1, 1, 2)
"""Micro-batches of each step."""
WORKING = 27
"""So many of the architectures have to work as they are."""


@dataclass(frozen=True)
class Trained:
    """What a training was: of each step its losses, and what the model held then."""

    losses: tuple[Tensor, ...]
    tensors: tuple[tuple[str, Tensor], ...]

    def differs(self, other: Trained) -> str:
        """The first thing that is not the same, bit for bit; "" if all is."""
        for index, (one, another) in enumerate(zip(self.losses, other.losses, strict=True)):
            if not same(one, another):
                return f"the loss of call {index}"
        mine, others = dict(self.tensors), dict(other.tensors)
        if mine.keys() != others.keys():
            return ", ".join(sorted(mine.keys() ^ others.keys()))
        return next((name for name in mine if not same(mine[name], others[name])), "")


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit."""
    return bool(one.dtype == other.dtype and torch.equal(one, other))


def trained(architecture: Architecture, model: nn.Module) -> Trained:
    """Three steps, the last of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    tensors: list[tuple[str, Tensor]] = []
    for step, batches in enumerate(STEPS):
        optimizer.zero_grad()
        for _ in range(batches):
            torch.manual_seed(len(losses))
            loss = architecture.loss(model(**architecture.inputs()))
            (loss / batches).backward()
            losses.append(loss.detach().clone())
        tensors += [
            (f"gradient of {name} in step {step}", p.grad.clone())
            for name, p in model.named_parameters()
            if p.grad is not None
        ]
        tensors += [
            (f"buffer {name} in step {step}", b.clone()) for name, b in model.named_buffers()
        ]
        optimizer.step()
    tensors += [(f"parameter {name}", p.detach().clone()) for name, p in model.named_parameters()]
    return Trained(tuple(losses), tuple(tensors))


@dataclass(frozen=True)
class Row:
    """How one architecture fared.

    Attributes:
        name, kind: of the architecture.
        outcome: "exact", "refused", or what is wrong.
        sentence: of the refusal.
        share: the budget "min" over the peak without a plan.
        seconds: of the wrapped training, plans included.
    """

    name: str
    kind: str
    outcome: str
    sentence: str = ""
    share: float = 0.0
    seconds: float = 0.0


def sentence(error: Exception) -> str:
    """What an error says, without where this machine keeps its packages."""
    return re.sub(r"\S*/site-packages/", "", str(error))


def without_cache(model: nn.Module) -> nn.Module:
    """A model that returns no keys and values, as the plan says that its steps do: eager copies
    them, and attention's products round otherwise with the copies' strides on some processors."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    return model


def outcome_of(architecture: Architecture) -> Row:
    """Train plain and wrapped."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return architecture.model().train()

    plain = trained(architecture, without_cache(model()))
    wrapped: Any = memopt.wrap(model(), "min", progress=False)
    began = time.perf_counter()
    try:
        planned = trained(architecture, wrapped)
    except MemoptError as error:
        return Row(architecture.name, architecture.kind, "refused", sentence(error))
    seconds = time.perf_counter() - began
    calls, plan = wrapped.calls, wrapped.memopt.plans[0]
    differs = planned.differs(plain)
    if differs:
        outcome = f"differs: {differs}"
    elif (calls.planned, calls.original, calls.replanned) != (sum(STEPS), 0, 0):
        outcome = f"not planned: {calls}"
    else:
        outcome = "exact"
    share = plan.peak_bytes / plan.baseline.peak_bytes
    return Row(architecture.name, architecture.kind, outcome, share=share, seconds=seconds)


def rows_of(name: str) -> list[Row]:
    """What an architecture does as it is, and, if that is refused, remedied."""
    architecture = next(one for one in ARCHITECTURES if one.name == name)
    row = outcome_of(architecture)
    if row.outcome != "refused" or architecture.remedy is None:
        return [row]
    return [row, outcome_of(architecture.remedy)]


def page(rows: Sequence[Row], note: str) -> str:
    """The results as Markdown."""
    names = {one.name for one in ARCHITECTURES}
    default = [row for row in rows if row.name in names]
    exact = sum(row.outcome == "exact" for row in default)
    refused = [row for row in default if row.outcome == "refused"]
    versions = f"transformers {transformers.__version__}, timm {timm.__version__}"
    parts = [
        "# Popular architectures",
        "`python -m benchmarks.trainer_architectures --out docs/results/trainer_architectures.md` "
        f"({versions}, torch {torch.__version__}, CPU): small models with random weights in "
        "their default "
        'configurations, dropout included, in `memopt.wrap(model, "min")`. Two steps and one of '
        "two accumulated micro-batches, beside the same model without memopt: **exact** means "
        "that all losses, gradients, buffers and parameters are equal bit for bit and that all "
        "four calls ran under a plan. Beside: with use_cache=False, as the plan says that it runs "
        "them.",
        f"**{exact} of {len(default)} are exact as they are**, {len(refused)} refused.",
        "*min* is the smallest budget over the step's peak without a plan, where parameters and "
        "gradients, which stay, are most of these small models; *seconds* are those of the wrapped "
        f"training with its two plans, made and solved. {note}".rstrip(),
        "\n".join(
            [
                "| architecture | kind | outcome | min | seconds |",
                "|---|---|---|---:|---:|",
                *map(_line, rows),
            ]
        ),
    ]
    if refused:
        parts.append("## Refusals")
        parts += [f"**{row.name}**: {row.sentence}" for row in refused]
    return "\n\n".join(parts) + "\n"


def _line(row: Row) -> str:
    if row.outcome != "exact":
        return f"| {row.name} | {row.kind} | {row.outcome} | | |"
    return f"| {row.name} | {row.kind} | exact | {row.share:.0%} | {row.seconds:.0f} |"


def main() -> int:
    """Print the page, and write it; 0 if enough work, and what is refused works remedied."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--note", default="", help="a sentence for the page, on the machine say")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = [one.name for one in ARCHITECTURES]
    unknown = set(arguments.only or ()) - set(names)
    if unknown:
        parser.error(f"no architecture {min(unknown)!r}; there are {', '.join(names)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        # Plans that are there already would not be solved.
        os.environ["MEMOPT_CACHE_DIR"] = folder
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
            for made in pool.map(rows_of, arguments.only or names):
                rows += made
                print(*made, sep="\n", flush=True)
    text = page(rows, arguments.note)
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    works = sum(row.outcome == "exact" and row.name in names for row in rows)
    wrong = [row for row in rows if row.outcome not in ("exact", "refused")]
    helpless = [row for row in rows if row.outcome == "refused" and row.name not in names]
    return int(bool(wrong or helpless or (not arguments.only and works < WORKING)))


if __name__ == "__main__":
    sys.exit(main())
