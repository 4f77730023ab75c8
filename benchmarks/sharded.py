"""memopt.shard under plans beside FSDP2, with and without checkpointing of every block.

A model is trained by gloo processes of one thread each, on this machine: by FSDP2
(`fully_shard` on each block and the root), by FSDP2 with torch's checkpointing of each block, and
by `memopt.shard` under three plans: one that keeps everything, one within the peak of checkpointed
FSDP2, and one within half of FSDP2's peak. Every round runs one step of each, so that what
disturbs the machine disturbs all alike; a step's time is the slowest rank's, and its peak the
largest rank's: the shards, and what the step allocates at most.

`engines`: training under torch's engines on two or four such processes, each beside itself with
memopt.wrap. Every cell trains a small model for five steps of AdamW, with clipping and two
micro-batches a step, twice: under the engine alone, and with planned calls at Rotor's smallest
budget. Its verdict is whether losses, norms and parameters agree bit for bit on every rank.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from benchmarks.runner import Benchmark, crossed, named
from benchmarks.shapes import gpt2_of
from benchmarks.table import by, joined, mib, ratio, table
from memopt.errors import InfeasibleBudgetError
from memopt.pricing.memory import metered
from tests.distributed import decoders
from tests.distributed.cases import loss_of, own
from tests.distributed.engines import ALL, Cell, cells
from tests.distributed.processes import results, run

import torchvision  # isort: skip

VOCABULARY = 2048


@dataclass(frozen=True)
class Subject:
    """A model that is trained: what it is, and the modules that have its blocks as children. Its
    parameters are not tied, so that FSDP2 sums gradients in the same order."""

    text: str
    build: Callable[[], Any]
    blocks: Callable[[Any], list[nn.Module]]
    inputs: Callable[[], dict[str, torch.Tensor]]


def _gpt2() -> Any:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 8, "vocab_size": VOCABULARY, "n_positions": 128}
    return gpt2_of(**sizes, **rates, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)


def _words() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (8, 128))
    return {"input_ids": ids, "labels": ids}


SUBJECTS = {
    "gpt2": Subject(
        "a GPT-2 of 6 layers of 256, 8 x 128 tokens", _gpt2, lambda m: [m.transformer.h], _words
    ),
    "resnet50": Subject(
        "torchvision's ResNet-50, 8 images of 96 x 96",
        torchvision.models.resnet50,
        lambda m: [m.layer1, m.layer2, m.layer3, m.layer4],
        lambda: {"x": torch.randn(8, 3, 96, 96)},
    ),
}


def fsdp(subject: Subject, mesh: DeviceMesh, checkpointed: bool) -> nn.Module:
    """Put the model under FSDP2."""
    model = seeded(subject)
    for blocks in subject.blocks(model):
        for name, block in blocks.named_children():
            if checkpointed:
                setattr(blocks, name, checkpoint_wrapper(block))
            fully_shard(blocks.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def seeded(subject: Subject) -> Any:
    """Build the model with the same parameters on all ranks."""
    torch.manual_seed(0)
    return subject.build()


def planned(subject: Subject, mesh: DeviceMesh, budget: Any) -> nn.Module:
    """Put the model under memopt.shard and a plan."""
    return memopt.wrap(memopt.shard(seeded(subject), mesh), budget, progress=False)


def slowest(value: float) -> float:
    """Give the largest of all ranks' values."""
    found = torch.tensor([value], dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.item()


class Step:
    """Training steps of one model on one batch."""

    def __init__(self, model: nn.Module, subject: Subject) -> None:
        self._model = model
        torch.manual_seed(torch.distributed.get_rank())
        self._inputs = subject.inputs()

    def __call__(self) -> None:
        output = self._model(**self._inputs)  # held, as a loop holds it, to the step's end
        loss_of(output).backward()
        self._model.zero_grad()

    def seconds(self) -> float:
        """Measure one step, on the slowest rank."""
        torch.distributed.barrier()
        begin = time.perf_counter()
        self()
        return slowest(time.perf_counter() - begin)

    def peak_bytes(self) -> int:
        """Measure the rank where it is largest: the shards, and what a step allocates."""
        self()
        resident = sum(one.untyped_storage().nbytes() for one in own(self._model))
        found = []
        for _ in range(3):  # threads of the group may free late what a collective used
            torch.distributed.barrier()
            with metered(torch.device("cpu")) as use:
                self()
            found.append(slowest(resident + use.peak_bytes))
        return int(min(found))


@dataclass(frozen=True)
class Row:
    """One way to train one model: its line, or its name and what the plan was refused for."""

    model: str
    text: str
    refused: str = ""


def measure(rank: int, ranks: int, name: str, rounds: int) -> list[Row]:
    """Do one rank's part: the rows."""
    subject, mesh = SUBJECTS[name], init_device_mesh("cpu", (ranks,))
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    refused: dict[str, str] = {}

    def add(way: str, make: Callable[[], nn.Module]) -> None:
        try:
            steps[way] = Step(make(), subject)
            peaks[way] = steps[way].peak_bytes()
        except InfeasibleBudgetError as error:
            steps.pop(way, None)
            refused[way] = str(error)

    add("FSDP2", lambda: fsdp(subject, mesh, False))
    add("plan, keeping everything", lambda: planned(subject, mesh, None))
    add("FSDP2, blocks checkpointed", lambda: fsdp(subject, mesh, True))
    within = peaks["FSDP2, blocks checkpointed"]
    add("plan within that peak", lambda: planned(subject, mesh, within))
    add("plan within half of FSDP2's", lambda: planned(subject, mesh, peaks["FSDP2"] // 2))
    for step in steps.values():
        step.seconds()
    in_turn = [{way: step.seconds() for way, step in steps.items()} for _ in range(rounds)]
    times = {way: [one[way] for one in in_turn] for way in steps}
    rows = [
        Row(name, f"{way} | {mib(peaks[way])} | {1e3 * statistics.median(found):.0f} | {over:.3f}")
        for way, found in times.items()
        if (over := ratio(times, way, "FSDP2"))
    ]
    return rows + [Row(name, *pair) for pair in refused.items()]


def _measured(given: Any, name: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        how = (Path(folder), name, given.rounds)
        return results(run(measure, given.ranks, *how, timeout_s=1800))[0]


def _blocks(rows: list[Row], given: Any) -> str:
    parts = []
    for name, found in by(rows, "model").items():
        text = SUBJECTS[name].text
        lines = [row.text for row in found if not row.refused]
        parts += [
            f"## {text[0].upper()}{text[1:]} on each of {given.ranks} ranks",
            table(" | peak of a rank, MiB | step, ms | ratio to FSDP2", lines),
            *(f"{row.text}: {row.refused}" for row in found if row.refused),
        ]
    return joined(*parts)


def _trained(_given: Any, ranks: int, name: str) -> list[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        found = results(run(cells, ranks, Path(folder), name, list(ALL), timeout_s=1800))
    # The rank that differs, or the one with the highest peak.
    return [
        max(same, key=lambda one: (one.failed, one.over_bytes or 0))
        for same in zip(*found, strict=True)
    ]


def _verdicts(rows: list[Cell], _given: Any) -> str:
    return joined(*(_on(*one) for one in sorted(by(rows, "ranks").items())))


def _on(ranks: int, rows: list[Cell]) -> str:
    names = list(dict.fromkeys(row.model for row in rows))
    by_place = {(row.engine, row.model): row for row in rows}

    def verdict(row: Cell | None) -> str:
        if row is None:
            return "–"
        over = row.over_bytes or 0
        peak = f", peak {abs(over):,} B {'above' if over > 0 else 'below'} budget" if over else ""
        return row.failed or f"same bits, {row.planned} of {row.calls} calls planned{peak}"

    lines = [
        " | ".join([engine, *(verdict(by_place.get((engine, name))) for name in names)])
        for engine in ALL
        if any((engine, name) in by_place for name in names)
    ]
    head = " | ".join(["engine", *(decoders.SUBJECTS[name].text for name in names)])
    return joined(f"{ranks} ranks.", table(head, lines))


BENCHMARK = Benchmark(
    row=Row,
    cases=named(tuple(SUBJECTS)),
    measure=_measured,
    blocks=_blocks,
    options={"ranks": 2, "rounds": 10},
)
ENGINES = Benchmark(
    row=Cell,
    cases=crossed((2, 4), decoders.SUBJECTS),
    measure=_trained,
    blocks=_verdicts,
)
