"""Predicted against measured peak and time on this machine's CPU: families x strategies x budgets.

Each model is profiled once, planned by each strategy at its smallest budget and half-way from that
to eager's peak, plain and at planned addresses, and run: the highest level that torch's allocator
reports in a step that is not the first, resident bytes included, against the plan's peak; and the
CPU time of the thread that works, which other processes do not lengthen, against the plan's time
(its transfers, which a second thread makes, left out on both sides by leaving out strategies that
move data). Beside the fourteen families there are models that return what nobody needs.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import memopt
from benchmarks.estimate_accuracy import ThreadClock
from benchmarks.runner import Benchmark
from benchmarks.table import joined, mib, table
from memopt.executor.check import measure_step
from memopt.pricing import measure
from memopt.profiler import Loss, MeasureOptions, profile_model
from memopt.programs.instructions import Compute
from memopt.step import backend
from tests.zoo import FAMILIES, Family

STRATEGIES = ("store-all", "rotor", "olla", "joint")
MEDIAN, WORST = 0.001, 0.01
"""What is promised of the peaks: relative differences."""


class Wasteful(nn.Module):
    """Returns features that the loss does not read, beside what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)
        )
        self.head, self.aside = nn.Linear(64, 8), nn.Linear(64, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.body(x) + x
        return self.head(y), self.aside(y).softmax(-1), y.detach()


class Unread(nn.Module):
    """Computes, and draws, what neither an output nor the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), 0.2)
            nn.functional.dropout(x @ x.t(), 0.5).mean()
        return x


def _made(name: str, make: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> Family:
    return Family(
        name, lambda _: make(), lambda _s, _b, g: (torch.randn(128, 64, generator=g),), loss
    )


EXTRA = (
    _made("returns unread outputs", Wasteful, lambda output: output[0].square().mean()),
    _made("computes unread values", Unread, lambda output: output.square().mean()),
)
MODELS: dict[str, Family] = {one.name: one for one in (*FAMILIES, *EXTRA)}


@dataclass(frozen=True)
class Row:
    """One plan's figures; bytes in all, seconds of a step."""

    model: str
    strategy: str
    budget: str
    predicted_bytes: int
    measured_bytes: int
    predicted_s: float
    measured_s: float
    operators: int
    """Kernels that the plan runs in a step."""

    @property
    def peak_error(self) -> float:
        """Relative; positive where more was measured."""
        return self.measured_bytes / self.predicted_bytes - 1

    @property
    def time_ratio(self) -> float:
        return self.measured_s / self.predicted_s

    @property
    def between_us(self) -> float:
        """Microseconds of an operator that are not its kernel's, on average."""
        return 1e6 * (self.measured_s - self.predicted_s) / self.operators


def _measured(_: Any, one: Family) -> list[Row]:
    with ExitStack() as stack:
        for module in (measure, backend):
            stack.enter_context(mock.patch.object(module, "time", ThreadClock))
        return rows_of(one)


def rows_of(one: Family) -> list[Row]:
    """Measure all plans of a model."""
    model, inputs = one.build("tiny"), one.inputs("tiny")
    profiled = profile_model(
        model, inputs, loss=Loss(one.loss), options=MeasureOptions(cap_s=0.05, max_rounds=7)
    )
    rows = []
    for strategy in STRATEGIES:
        for place in (False, True):
            least = _plan(profiled, strategy, "min", place)
            assert least.budget is not None
            between = (least.budget + max(least.budget, profiled.baseline.peak_bytes)) // 2
            plans = {"min": least, "half": _plan(profiled, strategy, between, place)}
            for label, plan in plans.items():
                peak, seconds = measure_step(plan, model, inputs, one.loss)
                name = strategy + " placed" * place
                count = sum(isinstance(step, Compute) for step in plan.program)
                figures = (plan.peak_bytes, peak, plan.step_time_s, seconds, count)
                rows.append(Row(one.name, name, label, *figures))
    return rows


def _plan(profiled: object, strategy: str, budget: int | str, place: bool) -> memopt.Plan:
    return memopt.plan(
        profiled, budget=budget, strategy=strategy, place=place, time_limit_s=5.0, progress=False
    )


def _blocks(rows: list[Row], _: Any) -> str:
    errors = [abs(row.peak_error) for row in rows]
    worst = sorted(rows, key=lambda row: -abs(row.peak_error))[:8]
    over = [row for row in rows if row.measured_bytes > row.predicted_bytes]
    columns = "model | strategy | budget"
    return joined(
        f"{len(rows)} plans of {len({r.model for r in rows})} models ({platform.machine()}).",
        f"- **Peak**: median difference {statistics.median(errors):.4%}, worst {max(errors):.3%}; "
        f"{sum(e == 0 for e in errors)} plans to the byte; {len(over)} measured above what was "
        f"predicted.\n- **Time**: {_times(rows)}",
        "The largest differences of the peak:",
        table(
            f"{columns} | predicted bytes | measured bytes | difference",
            [
                f"{_name(r)} | {r.predicted_bytes:,} | {r.measured_bytes:,} | {r.peak_error:+.4%}"
                for r in worst
            ],
        ),
        "All of them:",
        table(
            f"{columns} | predicted MiB | measured MiB | difference | time",
            [
                f"{_name(r)} | {mib(r.predicted_bytes, 3)} | {mib(r.measured_bytes, 3)} | "
                f"{r.peak_error:+.4%} | {r.time_ratio:.2f}"
                for r in rows
            ],
        ),
    )


def _name(row: Row) -> str:
    return f"{row.model} | {row.strategy} | {row.budget}"


def _times(rows: Sequence[Row]) -> str:
    ratios = [row.time_ratio for row in rows]
    least, most = (way(rows, key=lambda row: row.time_ratio) for way in (min, max))
    between = statistics.median(row.between_us for row in rows)
    return (
        f"measured over predicted, median {statistics.median(ratios):.2f}, from "
        f"{least.time_ratio:.2f} (`{least.model}`) to {most.time_ratio:.2f}; between kernels "
        f"{between:.0f} µs an operator (median). The {most.operators} kernels of `{most.model}` "
        f"take {1e3 * most.predicted_s:.2f} ms, the rest of its step "
        f"{1e3 * (most.measured_s - most.predicted_s):.2f} ms."
    )


def _failures(rows: list[Row], _: Any) -> list[str]:
    errors = [abs(row.peak_error) for row in rows]
    missed = statistics.median(errors) > MEDIAN or max(errors) > WORST
    return ["the peaks miss what is promised of them"] * missed


BENCHMARK = Benchmark(
    row=Row,
    cases={name: (one,) for name, one in MODELS.items()},
    measure=_measured,
    blocks=_blocks,
    failures=_failures,
)
