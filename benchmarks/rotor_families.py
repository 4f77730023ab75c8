"""Persistent, optimal and free plans of the fourteen families' chains (Rotor §5.3).

    python -m benchmarks.rotor_families [--folder FOLDER] [--out docs/results/rotor_families.md]
        [family ...]

Models of their published size, batch 8, estimated for a V100-PCIe; a capture takes most of the
time and is kept in FOLDER. Budgets are floor + x (baseline - floor): the floor is the persistent
class's smallest budget, the baseline stores everything.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rotor_chains import BATCH, DEVICE, estimated_chain
from benchmarks.rotor_solve import synthetic_chain
from memopt.models.chain import Chain
from memopt.strategies.rotor import Rotor, RotorFree, RotorOptimal, Sequential
from memopt.strategies.rotor.strategies import TableStrategy
from tests.zoo import FAMILIES

SHARES = (0, 0.25, 0.5, 0.75)
STRATEGIES: tuple[TableStrategy, ...] = (Rotor(), RotorOptimal(), RotorFree())
SAME = 1e-9


@dataclass(frozen=True)
class Result:
    """One chain's figures: times relative to the time without recomputation, CPU seconds."""

    name: str
    stages: int
    floor_bytes: int
    baseline_bytes: int
    smallest_bytes: tuple[int, ...]
    times: tuple[tuple[float, ...], ...]
    cpu_s: tuple[float, ...]
    grouped: tuple[bool, ...]


def compare(name: str, chain: Chain) -> Result:
    """The three strategies on one chain at every budget."""
    floor = Rotor().smallest_budget(chain)
    baseline = Sequential(1).smallest_budget(chain)
    times, cpu_s, smallest, grouped = [], [], [], []
    for strategy in STRATEGIES:
        started = time.process_time()
        plans = strategy.plan_set(chain)
        cpu_s.append(time.process_time() - started)
        smallest.append(plans.points[0].peak_bytes)
        grouped.append("groups" in plans.stats)
        row = []
        for share in SHARES:
            index = plans.at(int(floor + share * (baseline - floor)))
            found = float("inf") if index is None else plans.points[index].time_s
            row.append(found / chain.compute_time_s)
        times.append(tuple(row))
    return Result(
        name,
        len(chain),
        floor,
        baseline,
        tuple(smallest),
        tuple(times),
        tuple(cpu_s),
        tuple(grouped),
    )


def table(results: list[Result]) -> str:
    """The whole page."""
    lines = [
        "# Rotor's three classes on the model families' chains",
        "",
        f"`python -m benchmarks.rotor_families`: {len(results)} models of published size, batch "
        f"{BATCH}, estimated for {DEVICE}.",
        "Times over the time without recomputation at budgets floor + x (baseline - floor), for "
        "x = " + ", ".join(str(share) for share in SHARES) + ".",
        "A single figure where the classes agree to 1e-9; else persistent / optimal / free.",
        "* : the chain is longer than the program's limit, so neighbouring stages are grouped.",
        "",
        "| model | stages | floor GiB | baseline GiB | "
        + " | ".join(f"x = {share}" for share in SHARES)
        + " | CPU s: persistent, optimal, free |",
        "|" + "---|" * (5 + len(SHARES)),
    ]
    for result in results:
        cells = [
            _cell([times[i] for times in result.times], result.grouped) for i in range(len(SHARES))
        ]
        cpu = ", ".join(f"{seconds:.2f}" for seconds in result.cpu_s)
        lines.append(
            f"| {result.name} | {result.stages} | {result.floor_bytes / 2**30:.3f} | "
            f"{result.baseline_bytes / 2**30:.3f} | {' | '.join(cells)} | {cpu} |"
        )
    return "\n".join([*lines, "", *_summary(results), ""])


def _cell(times: list[float], grouped: tuple[bool, ...]) -> str:
    if max(times) - min(times) <= SAME * max(times):
        return f"{times[0]:.4f}"
    marks = ["*" if mark else "" for mark in grouped]
    return " / ".join(f"{t:.4f}{mark}" for t, mark in zip(times, marks, strict=True))


def _summary(results: list[Result]) -> list[str]:
    cells = len(results) * len(SHARES)
    lines = []
    for index, label in ((1, "Optimal"), (2, "Free")):
        gains = [
            1 - result.times[index][i] / result.times[0][i]
            for result in results
            for i in range(len(SHARES))
        ]
        faster = [gain for gain in gains if gain > SAME]
        lower = [r.name for r in results if r.smallest_bytes[index] < r.smallest_bytes[0]]
        lines.append(
            f"{label} is faster than persistent in {len(faster)} of {cells} cells, by at most "
            f"{max(gains, default=0):.2%} of the step, and has a lower floor on "
            f"{', '.join(lower) or 'no model'}."
        )
        lines.append("")
    return lines[:-1]


def main() -> None:
    """Print the page, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/rotor-chains"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("families", nargs="*", default=[family.name for family in FAMILIES])
    options = parser.parse_args()
    for strategy in STRATEGIES:
        strategy.plan_set(synthetic_chain(5))
    results = [compare(name, estimated_chain(name, 0, options.folder)) for name in options.families]
    page = table(results)
    sys.stdout.write(page)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page)


if __name__ == "__main__":
    main()
