"""Plans at 10% overhead that really run on this machine's CPU: measured peak, time, gradients.

    OMP_NUM_THREADS=1 python -m benchmarks.monet_real [--folder FOLDER] [--out FILE]
        [--limit SECONDS] [--rounds N] [--until profile|plans] [MODEL ...]

Each of MONeT's five models at a feasible batch: profiled here, planned for the least memory whose
predicted overhead is 10%, run beside eager and beside memopt's step without a budget, step by step
in turn. Implementations are those that are exact, so that the gradients are eager's bit for bit.
Kernels' costs are in memopt's cache (MEMOPT_CACHE_DIR), plans and finished rows in FOLDER: with
--until the timings can be taken while the machine is idle, the planning in between.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kept import Kept
from benchmarks.monet_runs import CASES, Case, Known, Runs, case_of, chosen_of
from benchmarks.steps import clear, interleaved, peak_of, ratio
from memopt.api import planning
from memopt.api.plan import Plan
from memopt.implementations import with_implementations
from memopt.models.device import Device
from memopt.profiler.backend import backend_of
from memopt.profiler.cache import ProfileCache
from memopt.profiler.measure import MeasureOptions
from memopt.profiler.session import Profiled, profile_model
from memopt.strategies.base import Strategy
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.store_all import StoreAll
from tests.zoo import get

CPU = torch.device("cpu")
OVERHEAD = 0.1
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One model: bytes are totals, resident included; overheads of time, of a step's."""

    name: str
    inputs: str
    eager_bytes: int
    predicted_bytes: int
    peak_bytes: int
    predicted_overhead: float
    overhead: float
    """Measured, as the predicted one is, over memopt's step without a budget."""
    free_over_eager: float
    """Memopt's step without a budget over eager's: no alternatives, nothing again."""
    over_eager: float
    chosen: dict[str, int]
    difference: float
    """Largest of a gradient's element to eager's, over the gradient's largest; 0: bit for bit."""


class Until(StrEnum):
    """How far a run goes."""

    PROFILE = "profile"
    PLANS = "plans"
    END = "end"


Way = Callable[[Runs, int], Strategy]
"""The strategy for a budget."""


def run(
    name: str,
    model: nn.Module,
    inputs: Any,
    ways: Mapping[str, Way],
    folder: Path,
    limit_s: float,
    rounds: int,
    *,
    until: Until = Until.END,
    exact_only: bool = True,
) -> list[Row]:
    """Profile, plan for 10% by each of `ways`, and measure beside eager; a row for each way that
    has a plan that only takes 10% more."""
    profiled = profile_model(model, inputs)
    options = MeasureOptions(cache=ProfileCache())
    profiled = with_implementations(profiled, exact_only=exact_only, options=options)
    if until is Until.PROFILE:
        return []
    runs = Runs(name, profiled.graph, folder, limit_s, device=Device())
    rows = []
    for way, strategy_at in ways.items():
        found = runs.memory_at(partial(strategy_at, runs), OVERHEAD)
        if found is not None and until is Until.END:
            budget = found.budget_bytes
            program = runs.program(strategy_at(runs, budget), budget)
            assert program is not None
            label = name if len(ways) == 1 else f"{name}, {way}"
            plan = _plan(profiled, Known(program))
            rows.append(measured(label, model, inputs, plan, rounds))
    return rows


def _plan(profiled: Profiled, strategy: Strategy) -> Plan:
    return planning.solve(profiled.graph, None, strategy, device=Device(), profiled=profiled)


def measured(name: str, model: nn.Module, inputs: Any, plan: Plan, rounds: int) -> Row:
    """A plan of a profiled model run beside eager and beside the plan without a budget."""
    assert plan.profiled is not None
    free = _plan(plan.profiled, StoreAll())
    steps = {
        "eager": _step(model, inputs),
        "free": _step(free.apply(model), inputs),
        "memopt": _step(plan.apply(model), inputs),
    }
    difference = _difference(model, {way: steps[way] for way in ("eager", "memopt")})
    peaks = {way: peak_of(model, step, CPU) for way, step in steps.items()}
    times = interleaved(model, steps, rounds, CPU)
    resident = plan.resident_bytes - backend_of("cpu").step_scalars_bytes
    return Row(
        name,
        _shapes(inputs),
        resident + peaks["eager"],
        plan.peak_bytes,
        resident + peaks["memopt"],
        plan.step_time_s / free.step_time_s - 1,
        ratio(times, "memopt", "free") - 1,
        ratio(times, "free", "eager") - 1,
        ratio(times, "memopt", "eager") - 1,
        chosen_of(plan.profiled.graph, plan.program),
        difference,
    )


def _step(module: nn.Module, inputs: Any) -> Callable[[], object]:
    def step() -> None:
        torch.manual_seed(3)
        output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        loss: Tensor = output if output.ndim == 0 else output.square().mean()
        loss.backward()

    return step


def _difference(model: nn.Module, steps: dict[str, Callable[[], object]]) -> float:
    """Of the two ways' gradients, see Row."""
    found: list[list[Tensor]] = []
    for step in steps.values():
        clear(model)
        step()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    clear(model)
    worst = 0.0
    for a, b in zip(*found, strict=True):
        if not torch.equal(a, b):
            worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst


def _shapes(inputs: Any) -> str:
    values = inputs.values() if isinstance(inputs, dict) else inputs
    return ", ".join("×".join(map(str, x.shape)) for x in values)


MEANING = (
    "Overheads of time are of memopt's step without a budget, which runs the captured kernels once "
    "each, and that one's and the plan's are of eager's step."
)


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| model | inputs | eager, MiB | plan: predicted, measured | share | overhead: predicted, "
        "measured | without a budget / eager | plan / eager | gradients | implementations chosen |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        equal = "bit for bit" if row.difference == 0 else f"off by {row.difference:.1e}"
        chosen = ", ".join(f"{n}× {name}" for name, n in row.chosen.items()) or "none"
        lines.append(
            f"| {row.name} | {row.inputs} | {row.eager_bytes / MIB:.0f} | "
            f"{row.predicted_bytes / MIB:.0f}, {row.peak_bytes / MIB:.0f} | "
            f"{row.peak_bytes / row.eager_bytes:.2f} | {row.predicted_overhead:+.1%}, "
            f"{row.overhead:+.1%} | {row.free_over_eager:+.1%} | {row.over_eager:+.1%} | {equal} | "
            f"{chosen} |"
        )
    return lines


def page(rows: list[Row], command: str) -> str:
    """The whole page."""
    lines = [
        "# MONeT's models, run",
        "",
        f"`{command}`, one thread; kernels and steps timed with a core to themselves on a machine "
        "otherwise busy. The plan of least memory whose predicted overhead is 10%; 'share' is its "
        "measured peak over eager's, resident bytes included. " + MEANING,
        "",
        *table(rows),
    ]
    return "\n".join([*lines, ""])


def images(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model at its published size, and its batch."""
    torch.manual_seed(0)
    model = get(case.family).build("paper").train()
    return model, (torch.randn(case.cpu_batch, 3, *case.cpu_pixels),)


def main() -> None:
    """Print the page, and write it after every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-real"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--until", type=Until, default=Until.END, choices=tuple(Until))
    parser.add_argument("models", nargs="*", default=[case.family for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.folder / "rows.json", Row, {"limit_s": options.limit})
    text = ""
    ways: dict[str, Way] = {"MONeT": lambda _runs, _budget: Monet()}
    for name in kept.missing(options.models, lambda note: sys.stderr.write(f"{note}\n")):
        model, inputs = images(case_of(name))
        rows = run(
            name, model, inputs, ways, options.folder, options.limit, options.rounds,
            until=options.until,
        )  # fmt: skip
        if options.until is Until.END:
            kept.add(name, rows)
    text = page(kept.ordered(options.models), "python -m benchmarks.monet_real")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
