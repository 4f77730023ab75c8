"""Predicted against measured peak and time on this machine's CPU: families x strategies x budgets.

    OMP_NUM_THREADS=1 python -m benchmarks.prediction [--out docs/results/prediction.md]
        [--only MODEL ...] [--resume FILE] [--fresh]

Each model is profiled once, planned by each strategy at its smallest budget and half-way from that
to eager's peak, plain and at planned addresses, and run: the highest level that torch's allocator
reports in a step that is not the first, resident bytes included, against the plan's peak; and the
CPU time of the thread that works, which other processes do not lengthen, against the plan's time
(its transfers, which a second thread makes, left out on both sides by leaving out strategies that
move data). Beside the fourteen families there are models that return what nobody needs.

A model's rows are kept in a JSON file (in out/ by default), so that a run cut short is taken up.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import memopt
from benchmarks.estimate_accuracy import ThreadClock
from benchmarks.kept import Kept
from memopt.executor.check import measure_step
from memopt.profiler import Loss, MeasureOptions, backend, measure, profile_model
from memopt.programs.instructions import Compute
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
        """Measured over predicted."""
        return self.measured_s / self.predicted_s

    @property
    def between_us(self) -> float:
        """Microseconds of an operator that are not its kernel's, on average."""
        return 1e6 * (self.measured_s - self.predicted_s) / self.operators


def rows_of(one: Family) -> list[Row]:
    """All plans of a model."""
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
            for label, plan in (
                ("min", least),
                ("half", _plan(profiled, strategy, between, place)),
            ):
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


def page(rows: Sequence[Row]) -> str:
    """The table and what follows from it."""
    errors = sorted(abs(row.peak_error) for row in rows)
    worst = sorted(rows, key=lambda row: -abs(row.peak_error))[:8]
    over = [row for row in rows if row.measured_bytes > row.predicted_bytes]
    lines = [
        "# Predicted and measured",
        "",
        f"`python -m benchmarks.prediction`: {len(rows)} plans of {len({r.model for r in rows})} "
        f"models on this CPU ({platform.machine()}, torch {torch.__version__.partition('+')[0]}, "
        "one thread); see the script for how.",
        "",
        f"- **Peak**: median difference {statistics.median(errors):.4%}, worst {errors[-1]:.3%}; "
        f"{sum(e == 0 for e in errors)} plans to the byte; {len(over)} measured above what was "
        "predicted.",
        f"- **Time**: {_times(rows)}",
        "",
        "The largest differences of the peak:",
        "",
        "| model | strategy | budget | predicted bytes | measured bytes | difference |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {r.model} | {r.strategy} | {r.budget} | {r.predicted_bytes:,} | {r.measured_bytes:,} | "
        f"{r.peak_error:+.4%} |"
        for r in worst
    ]
    lines += [
        "",
        "All of them:",
        "",
        "| model | strategy | budget | predicted MiB | measured MiB | difference | time |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.model} | {r.strategy} | {r.budget} | {r.predicted_bytes / 2**20:.3f} | "
        f"{r.measured_bytes / 2**20:.3f} | {r.peak_error:+.4%} | {r.time_ratio:.2f} |"
        for r in rows
    ]
    return "\n".join([*lines, ""])


def _times(rows: Sequence[Row]) -> str:
    """What the column of times says, and where its largest ratio comes from."""
    ratios = sorted(row.time_ratio for row in rows)
    least, most = (way(rows, key=lambda row: row.time_ratio) for way in (min, max))
    more_s = most.measured_s - most.predicted_s
    between = statistics.median(row.between_us for row in rows)
    return (
        f"measured over predicted, median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f} (CPU time). A prediction sums kernels, each measured alone; a step has "
        "Python, the dispatcher and autograd between them, and the planned module's own work "
        f"around them: of these tiny models {between:.0f} µs an operator (median). That weighs "
        f"most where there is least to compute: the {most.operators} kernels of `{most.model}` "
        f"take {1e3 * most.predicted_s:.2f} ms, the rest of the step {1e3 * more_s:.2f} ms. The "
        f"least ratio is that of `{least.model}`, whose kernels took longer when they were "
        "measured, at most seven times and within 0.05 s for all, than in the step."
    )


def main() -> int:
    """Run from the command line; 130 if interrupted, 1 if the peaks miss what is promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction")
    parser.add_argument("--only", nargs="+", metavar="MODEL", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, default=Path("out/prediction.json"))
    parser.add_argument("--fresh", action="store_true", help="drop the rows kept so far")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"torch": torch.__version__, "strategies": list(STRATEGIES)}
    kept = Kept(options.resume, Row, settings, fresh=options.fresh)
    try:
        for name in kept.missing(options.only, print):
            with ExitStack() as stack:
                for module in (measure, backend):
                    stack.enter_context(mock.patch.object(module, "time", ThreadClock))
                begin = time.monotonic()
                kept.add(name, rows_of(MODELS[name]))
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; the same command takes up what {kept.path} keeps")
        return 130
    rows = kept.ordered(MODELS)
    text = page(rows)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print("\n".join(text.splitlines()[:18]))
    errors = sorted(abs(row.peak_error) for row in rows)
    return int(statistics.median(errors) > MEDIAN or errors[-1] > WORST)


if __name__ == "__main__":
    raise SystemExit(main())
