"""Rotor §5.3-5.5 again, estimated for the V100-PCIe of the paper.

    python -m benchmarks.rotor_paper [--folder FOLDER] [--out docs/results/rotor_paper.md]
        [MODEL:PIXELS ...]

Batch 8, the largest of Rotor's figures 6 and 7. For every model and image size: the persistent
program and revolve at 10 budgets equally spaced from 0 to the store-all peak, and sequential with
10 segment counts from 2 to 2√L. A capture takes most of the time and is kept in FOLDER. Beside the
page, a figure of throughput against peak is written (the same name, .png).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.rotor_chains import BATCH, DEVICE, estimated_chain
from benchmarks.rotor_solve import synthetic_chain
from memopt.models.chain import Chain
from memopt.strategies.rotor import Revolve, Rotor, RotorOptimal, Sequential
from memopt.strategies.rotor.plan_sets import CurvePoint, PlanSet

GIB = 2**30
CAPACITY_BYTES = int(15.75 * GIB)
BUDGETS = 10
PAPER_GAIN = 0.128
MODELS = (
    *(f"resnet{depth}" for depth in (18, 50, 101, 152)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    "inception_v3",
)
CASES = (
    *(f"{model}:{pixels}" for pixels in (224, 500, 1000) for model in MODELS),
    "resnet1001:224",
)
PICTURED = 4


@dataclass(frozen=True)
class Result:
    """One model and image size. Times are seconds; points are (peak bytes, step time)."""

    case: str
    stages: int
    store_all: CurvePoint
    rotor: PlanSet
    revolve: PlanSet
    sequential: tuple[CurvePoint, ...]
    rotor_cpu_s: float
    optimal_cpu_s: float | None

    def budgets(self) -> list[int]:
        """Equally spaced from 0 to the store-all peak, 0 left out."""
        return [self.store_all.peak_bytes * i // BUDGETS for i in range(1, BUDGETS + 1)]

    def throughput(self, plans: PlanSet, budget: int) -> float | None:
        """Images per second of the fastest schedule within the budget."""
        index = plans.at(budget)
        return None if index is None else BATCH / plans.points[index].time_s

    def gain(self) -> float | None:
        """Rotor over the sequential of highest throughput that fits the card, at its peak."""
        fitting = [p for p in self.sequential if p.peak_bytes <= CAPACITY_BYTES]
        return None if not fitting else self.gain_at(min(fitting, key=lambda p: p.time_s))

    def gain_at(self, point: CurvePoint) -> float | None:
        """Gain in throughput of Rotor within the peak of a sequential schedule."""
        found = self.throughput(self.rotor, point.peak_bytes)
        return None if found is None else found * point.time_s / BATCH - 1


def evaluate(case: str, chain: Chain) -> Result:
    """All strategies on one chain."""
    started = time.process_time()
    rotor = Rotor().plan_set(chain)
    rotor_cpu_s = time.process_time() - started
    optimal_cpu_s = None
    optimal = RotorOptimal()
    if len(chain) <= optimal.most_stages:
        started = time.process_time()
        optimal.plan_set(chain)
        optimal_cpu_s = time.process_time() - started
    return Result(
        case,
        len(chain),
        Sequential(1).curve(chain)[0],
        rotor,
        Revolve().plan_set(chain),
        Sequential("best").curve(chain),
        rotor_cpu_s,
        optimal_cpu_s,
    )


def page(results: list[Result], command: str) -> str:
    """The whole page."""
    gains = [gain for result in results if (gain := result.gain()) is not None]
    everywhere = [
        gain
        for result in results
        for point in result.sequential
        if (gain := result.gain_at(point)) is not None
    ]
    missing = [case for case in CASES if case not in {result.case for result in results}]
    lines = [
        "# Rotor's experiments (§5.3-5.5), estimated",
        "",
        f"`{command}`. Batch {BATCH}, {DEVICE} in estimate mode (no GPU is involved), "
        f"{len(results)} cases. Not in this run: {', '.join(missing) or 'none'}.",
        "",
        "Gain: Rotor's throughput over that of the fastest sequential (10 segment counts from 2 to "
        "2√L) that fits 15.75 GiB, within the same peak.",
        f"Mean {statistics.mean(gains):.1%} over {len(gains)} cases (least {min(gains):.1%}, most "
        f"{max(gains):.1%}); the paper measured {PAPER_GAIN:.1%} on its own set. Over every "
        f"undominated sequential schedule, whatever its peak: {statistics.mean(everywhere):.1%} "
        f"({len(everywhere)} schedules).",
        "",
        "| model:pixels | stages | store all: GiB, images/s | best sequential: GiB, images/s | "
        "Rotor there | gain | revolve there | CPU s: persistent | CPU s: optimal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(result) for result in results]
    lines += [
        "",
        "The paper's Figure 5 is drawn only; §5.3 states: persistent (C, one core) below 1 s on "
        "most networks and below 20 s on its longest chain (339 stages). The CPU seconds here are "
        "for every budget at once, with the schedules and their replay, on a shared machine; "
        '"-" where the chain is longer than the optimal program takes without grouping.',
        "",
        "## Throughput at ten budgets",
        "",
        "Images per second, Rotor / revolve, at k/10 of the store-all peak; - : does not fit.",
        "",
        "| model:pixels | " + " | ".join(f"{i}/10" for i in range(1, BUDGETS + 1)) + " |",
        "|" + "---|" * (BUDGETS + 1),
    ]
    for result in results:
        cells = [
            f"{_number(result.throughput(result.rotor, budget))} / "
            f"{_number(result.throughput(result.revolve, budget))}"
            for budget in result.budgets()
        ]
        lines.append(f"| {result.case} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _row(result: Result) -> str:
    fitting = [p for p in result.sequential if p.peak_bytes <= CAPACITY_BYTES]
    best = min(fitting, key=lambda p: p.time_s) if fitting else None
    gain = result.gain()
    at = best.peak_bytes if best else CAPACITY_BYTES
    optimal = "-" if result.optimal_cpu_s is None else f"{result.optimal_cpu_s:.2f}"
    cells = [
        result.case,
        str(result.stages),
        _point(result.store_all),
        _point(best),
        _number(result.throughput(result.rotor, at)),
        "-" if gain is None else f"{gain:.1%}",
        _number(result.throughput(result.revolve, at)),
        f"{result.rotor_cpu_s:.2f}",
        optimal,
    ]
    return f"| {' | '.join(cells)} |"


def _point(point: CurvePoint | None) -> str:
    if point is None:
        return "-"
    return f"{point.peak_bytes / GIB:.2f}, {_number(BATCH / point.time_s)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def picture(results: list[Result], path: Path) -> None:
    """Throughput against peak of the longest chains, one panel each, of different models."""
    chosen: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: -r.stages):
        chosen.setdefault(result.case.partition(":")[0], result)
    shown = list(chosen.values())[:PICTURED]
    figure = Figure(figsize=(9, 6), layout="constrained")
    for index, result in enumerate(shown):
        axes = figure.add_subplot(2, 2, index + 1)
        for plans, style, label in (
            (result.rotor, "b-", "Rotor"),
            (result.revolve, "g-", "revolve"),
        ):
            axes.step(
                [p.peak_bytes / GIB for p in plans.points],
                [BATCH / p.time_s for p in plans.points],
                style,
                where="post",
                label=label,
            )
        axes.plot(
            [p.peak_bytes / GIB for p in result.sequential],
            [BATCH / p.time_s for p in result.sequential],
            "x",
            color="purple",
            label="sequential",
        )
        store = result.store_all
        axes.plot(store.peak_bytes / GIB, BATCH / store.time_s, "rs", label="store all")
        axes.set_title(f"{result.case}, {result.stages} stages")
        axes.set_xlabel("peak, GiB")
        axes.set_ylabel("images/s")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Print the page; write it and its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/rotor-chains"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES, help="MODEL:PIXELS")
    options = parser.parse_args()
    for strategy in (Rotor(), Rotor(exact_stages=0), Revolve(), RotorOptimal()):
        strategy.plan_set(synthetic_chain(5))
    RotorOptimal(exact_stages=0).plan_set(synthetic_chain(5))
    results = []
    for case in options.cases:
        name, _, pixels = case.partition(":")
        results.append(evaluate(case, estimated_chain(name, int(pixels), options.folder)))
    command = "python -m benchmarks.rotor_paper"
    if tuple(options.cases) != CASES:
        command += " " + " ".join(options.cases)
    text = page(results, command)
    sys.stdout.write(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + f"\n![Throughput against peak]({options.out.stem}.png)\n")
        picture(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
