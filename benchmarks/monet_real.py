"""Plans at 10% overhead that really run on this machine's CPU: measured peak, time, gradients.

    OMP_NUM_THREADS=1 python -m benchmarks.monet_real [--folder FOLDER] [--out FILE]
        [--limit SECONDS] [--rounds N] [MODEL ...]

Each of MONeT's five models at a feasible batch: profiled here, planned for the least memory whose
predicted overhead is 10%, run beside eager, step by step in turn. Implementations are those that
are exact, so that the gradients are eager's bit for bit. A finished model's row is kept in FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kept import Kept
from benchmarks.monet_runs import CASES, Case, Runs, case_of, chosen_of
from benchmarks.steps import clear, interleaved, peak_of, ratio
from memopt import planning
from memopt.implementations import with_implementations
from memopt.models.device import Device
from memopt.profiler.session import STEP_SCALARS_BYTES, profile_model
from memopt.strategies.base import Strategy
from memopt.strategies.monet.strategy import Monet
from tests.zoo import get

CPU = torch.device("cpu")
OVERHEAD = 0.1
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One model: bytes are totals, resident included; times in seconds."""

    name: str
    inputs: str
    eager_bytes: int
    predicted_bytes: int
    peak_bytes: int
    predicted_overhead: float
    overhead: float
    chosen: dict[str, int]
    difference: float
    """Largest of a gradient's element to eager's, over the gradient's largest; 0: bit for bit."""


def run(
    name: str,
    model: nn.Module,
    inputs: Any,
    strategy: Strategy,
    folder: Path,
    limit_s: float,
    rounds: int,
) -> Row | None:
    """Profile, plan for 10% and measure beside eager; None: no plan takes only 10% more."""
    profiled = profile_model(model, inputs)
    exact_only = bool(getattr(strategy, "exact_only", True))
    profiled = with_implementations(profiled, exact_only=exact_only)
    runs = Runs(name, profiled.graph, folder, limit_s, device=Device())
    found = runs.memory_at(strategy, OVERHEAD, ())
    if found is None or found.time_s is None:
        return None
    plan = planning.solve(
        profiled.graph,
        found.budget_bytes,
        strategy,
        device=Device(),
        profiled=profiled,
        time_limit_s=limit_s,
    )
    planned = plan.apply(model)
    steps = {"eager": _step(model, inputs), "memopt": _step(planned, inputs)}
    difference = _difference(model, steps)
    peaks = {way: peak_of(model, step, CPU) for way, step in steps.items()}
    overhead = ratio(interleaved(model, steps, rounds, CPU), "memopt", "eager") - 1
    resident = plan.resident_bytes - STEP_SCALARS_BYTES["cpu"]
    return Row(
        name,
        _shapes(inputs),
        resident + peaks["eager"],
        plan.peak_bytes,
        resident + peaks["memopt"],
        plan.step_time_s / runs.base_s - 1,
        overhead,
        chosen_of(profiled.graph, plan.program),
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


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| model | inputs | eager, MiB | plan: predicted, measured | share | overhead: predicted, "
        "measured | gradients | implementations chosen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = "bit for bit" if row.difference == 0 else f"off by {row.difference:.1e}"
        chosen = ", ".join(f"{n}× {name}" for name, n in row.chosen.items()) or "none"
        lines.append(
            f"| {row.name} | {row.inputs} | {row.eager_bytes / MIB:.0f} | "
            f"{row.predicted_bytes / MIB:.0f}, {row.peak_bytes / MIB:.0f} | "
            f"{row.peak_bytes / row.eager_bytes:.2f} | {row.predicted_overhead:+.1%}, "
            f"{row.overhead:+.1%} | {equal} | {chosen} |"
        )
    return lines


def page(rows: list[Row], command: str) -> str:
    """The whole page."""
    lines = [
        "# MONeT's models, run",
        "",
        f"`{command}`, one thread of a shared machine. The plan of least memory whose predicted "
        "overhead is 10%; 'share' is its measured peak over eager's, resident bytes included.",
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("models", nargs="*", default=[case.family for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.folder / "rows.json", Row, {"limit_s": options.limit})
    text = ""
    for name in kept.missing(options.models, lambda note: sys.stderr.write(f"{note}\n")):
        model, inputs = images(case_of(name))
        row = run(name, model, inputs, Monet(), options.folder, options.limit, options.rounds)
        kept.add(name, [] if row is None else [row])
    text = page(kept.ordered(options.models), "python -m benchmarks.monet_real")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
