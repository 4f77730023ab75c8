"""Recorded decisions of other planners, beside memopt's plan of the same step in the same memory.

The steps are published ones of `benchmarks.published`: decoders whose parameters 8 GPUs share, with
compiled kernels. memopt plans one rank's step: as it is, if that fits, else by the strategy of WAYS
whose plan is fastest. The plans have passed the validator; a few equal layers are captured and
repeated (`memopt.step.more_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.published import measurements, row_of, tokens
from benchmarks.published.decoder import Decoder, Style, sharded
from benchmarks.published.meshes import ALL_DEVICES
from benchmarks.runner import Benchmark
from benchmarks.table import gib, table
from memopt.api.cluster import on_mesh
from memopt.api.solving import solve
from memopt.errors import InfeasibleBudgetError
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import parse_budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.plan_record import PlanRecord
from memopt.profiler.estimate import estimate_model
from memopt.profiler.variants import StepVariant, Variants
from memopt.programs.instructions import SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies import resolve


@dataclass(frozen=True)
class Decision:
    """A decision of another planner: the published step that it led to, the one beside it that it
    did not plan, and what it moved.

    Attributes:
        budget: of the planner; "": what the step of the row `fits` takes as it is, which ran; or,
            without such a row, the GPU's capacity.
    """

    row: str
    without: str
    moved: str
    budget: str = ""
    fits: str = ""


DECISIONS = (
    Decision("deepspeed-8255-3", "deepspeed-8255-1", "0"),
    Decision("deepspeed-8255-6", "deepspeed-8255-4", "0"),
    Decision("deepspeed-8255-8", "deepspeed-8255-7", "11.7 GB", fits="deepspeed-8255-6"),
    Decision("torchtitan-4636-4", "torchtitan-4636-1", "8.2 GiB", budget="68.86GiB"),
)
WAYS = ("rotor", "rotor-menus", "offload-graph")
"""Strategies that are asked where a step does not fit as it is."""


@dataclass(frozen=True)
class Row:
    """memopt's plan within the budget that both had, as estimated.

    Attributes:
        needed_bytes, least_s: what the step takes as it is, and the least of any plan.
        what: "as it is", or the strategy, and the schedule if it names one.
        step_s: its update included.
    """

    name: str
    budget_bytes: int
    needed_bytes: int
    what: str
    step_s: float
    peak_bytes: int
    moved_bytes: int
    least_s: float = 0.0
    failed: str = ""


@dataclass(frozen=True)
class Step:
    """One rank's step: its graph, and the seconds of its update."""

    graph: Graph
    update_s: float
    device: Device

    @property
    def peak_bytes(self) -> int:
        return replay(self.graph, store_all(self.graph)).peak_bytes

    @property
    def least_s(self) -> float:
        """The least seconds of any plan."""
        return time_lower_bound(self.graph) + self.update_s


@contextmanager
def _sharded(model: nn.Module, ranks: int) -> Iterator[Any]:
    with on_mesh(partial(sharded, model), memopt.Mesh(data=ranks), "estimate") as built:
        yield built


@cache
def step_of(name: str, layers: int | None = None) -> Step:
    """Estimate a published row's step; `layers`: instead of the model's own."""
    row = row_of(name)
    shape, device = measurements().models[row["model"]], ALL_DEVICES[row["gpu"]]
    with torch.device("meta"):
        model = Decoder(shape, Style(), layers or shape["layers"], row["sequence"], first=True)
        ids = torch.zeros(row["batch"], row["sequence"], dtype=torch.int64)
    dtype = getattr(torch, row["parameters"])

    def price(built: nn.Module, given: Any, _kernels: str) -> Any:
        return estimate_model(built, given, device, kernels="compiled")

    made = Variants(model.to(dtype), (ids, ids), device, price, _sharded)
    found = made.step(StepVariant(ranks=row["dp"]))
    state = found.with_optimizer(row["optimizer"])
    held = found.graph.extra_resident_bytes + state.state.bytes_total
    return Step(replace(found.graph, extra_resident_bytes=held), state.update_s(device), device)


def planned(step: Step, budget_bytes: int) -> tuple[str, PlanRecord] | None:
    """Plan a step: as it is, if that fits; else the fastest of WAYS; None: nothing fits."""
    found: list[tuple[str, PlanRecord]] = []
    for name in ("store-all",) if step.peak_bytes <= budget_bytes else WAYS:
        try:
            plan = solve(step.graph, budget_bytes, resolve(name), device=step.device)
        except InfeasibleBudgetError:
            continue
        schedule = plan.stats.get("schedule")
        what = name if schedule is None else f"{name}, {schedule}"
        found.append(("as it is" if name == "store-all" else what, plan))
    return min(found, key=lambda one: one[1].step_time_s) if found else None


def decided(_: Any, decision: Decision) -> list[Row]:
    """Plan a step as another planner did."""
    step = step_of(decision.row)
    budget = step.device.capacity_bytes or 0
    if decision.fits:
        budget = step_of(decision.fits).peak_bytes
    elif decision.budget:
        budget = parse_budget(decision.budget, budget)
    found = planned(step, budget)
    if found is None:
        return [Row(decision.row, budget, step.peak_bytes, "", 0.0, 0, 0, 0.0, "no plan")]
    what, plan = found
    out = [one.tensor for one in plan.program.instructions if isinstance(one, SwapOut)]
    moved = sum(plan.graph.tensors[tensor].size_bytes for tensor in out)
    time_s = plan.step_time_s + step.update_s
    figures = (step.peak_bytes, what, time_s, plan.peak_bytes, moved, step.least_s)
    return [Row(decision.row, budget, *figures)]


def theirs_s(name: str) -> float:
    """Return the seconds of a published step."""
    row = row_of(name)
    return float(row.get("step_s") or tokens(row) / row["tokens_per_s"])


def _line(row: Row) -> list[str]:
    decision = next(one for one in DECISIONS if one.row == row.name)
    one = row_of(row.name)
    return [
        f"{one['model']}, {one['batch']} x {one['sequence']} on {one['gpus']} {one['gpu']}",
        *(gib(row.budget_bytes), f"{theirs_s(decision.without):.2f}"),
        *(decision.moved, f"{theirs_s(row.name):.2f}"),
        *(gib(row.needed_bytes), row.what, gib(row.moved_bytes), gib(row.peak_bytes)),
        *(f"{row.step_s:.2f}", f"{row.least_s:.2f}"),
    ]


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    head = (
        "step | budget GiB | s without their planner | theirs: moved | s | "
        "memopt: as it is GiB | plan | moved GiB | peak GiB | s, estimated | "
        "s of any plan, at least"
    )
    return {"decisions": table(head, map(_line, rows))}


def _failures(rows: list[Row], _: Any) -> list[str]:
    slower = [f"{r.name}: slower than theirs" for r in rows if r.step_s > theirs_s(r.name)]
    return slower + [f"{row.name}: {row.failed}" for row in rows if row.failed]


BENCHMARK = Benchmark(
    row=Row,
    cases={one.row: (one,) for one in DECISIONS},
    measure=decided,
    blocks=_blocks,
    failures=_failures,
    page="docs/results/published.md",
)
