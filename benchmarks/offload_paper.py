"""Offloading §6 again: ratios to the best lower bound, table and figures.

    python -m benchmarks.offload_paper --out docs/results/offload --quick

Every network, image size and batch size is planned at budgets from its floor to M_peak. For every
strategy three times are compared with max(Proposition 3, fractional optimum): the paper's model
with interruptible transfers, the same with whole transfers, and the program memopt runs.
A factory turns (family, depth, batch, image) into a chain; `FACTORIES` names those there are.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.offload_nets import FAMILIES, V100_PCIE
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.strategies.base import Status, Strategy
from memopt.strategies.offload import AutoSwap, DynProg, Greedy, OffloadExact, Tflms, Vdnn
from memopt.strategies.offload.problem import offload_problem

Factory = Callable[[str, int, int, int], Chain]

BATCHES = {224: (16, 32, 64), 500: (4, 8, 16), 1000: (1, 2, 4)}
FACTORIES: dict[str, Factory] = {
    "analytic": lambda family, depth, batch, image: FAMILIES[family][0](depth, batch, image),
}
MODELS = ("paper", "whole", "program")
DYNPROG, VDNN = "dynprog (paper's set)", "vdnn"


def strategies(quick: bool) -> dict[str, Strategy]:
    """What is compared; the slow ones only without --quick."""
    found: dict[str, Strategy] = {
        "greedy": Greedy(),
        DYNPROG: DynProg(refine=False),
        "dynprog": DynProg(),
        VDNN: Vdnn(),
        "tflms": Tflms(),
    }
    if not quick:
        found["autoswap"] = AutoSwap(trials=40)
        found["offload-exact"] = OffloadExact(effort=1.0, max_stages=64)
    return found


def cells(factory: Factory, device: Device, points: int, quick: bool) -> Iterator[dict[str, Any]]:
    """One row per network, image, batch and budget: times of every strategy, seconds."""
    compared = strategies(quick)
    for family, (_, depths) in FAMILIES.items():
        for depth, image in itertools.product(depths, BATCHES):
            for batch in BATCHES[image][1:2] if quick else BATCHES[image]:
                chain = factory(family, depth, batch, image)
                for index in range(points):
                    row: dict[str, Any] = {
                        "family": family,
                        "depth": depth,
                        "image": image,
                        "batch": batch,
                        "stages": len(chain),
                        "share": index / (points - 1),
                    }
                    yield row | solve_all(chain, device, index / (points - 1), compared)


def solve_all(
    chain: Chain, device: Device, share: float, compared: dict[str, Strategy]
) -> dict[str, Any]:
    """Times of every strategy at one budget: floor + share·(M_peak - floor)."""
    problem = offload_problem(chain, None, device)
    floor, peak = problem.floor_bytes, problem.peak_bytes
    budget = chain.resident_bytes + floor + round(share * (peak - floor))
    row: dict[str, Any] = {"budget": budget, "compute_s": problem.compute_time_s}
    for name, strategy in compared.items():
        if strategy.why_not(chain) is not None:
            continue
        solution = strategy.solve(chain, budget, device=device)
        if solution.status is Status.INFEASIBLE:
            continue
        stats = solution.stats
        row["bound_s"] = max(stats["proposition_3_s"], stats["fractional_optimum_s"])
        row[f"{name}|paper"] = stats["paper_time_s"]
        row[f"{name}|whole"] = stats["paper_whole_time_s"]
        row[f"{name}|program"] = solution.time_s
        assert solution.peak_bytes is not None
        assert solution.peak_bytes <= budget
    return row


def ratios(rows: Iterable[dict[str, Any]], name: str, model: str) -> list[float]:
    """Times over the bound where the strategy has a plan."""
    key = f"{name}|{model}"
    return [float(r[key]) / float(r["bound_s"]) for r in rows if key in r]


def rises(rows: list[dict[str, Any]], key: str) -> int:
    """How often a larger budget of the same chain is slower, by more than 1e-9 of the time."""
    count = 0
    for before, after in itertools.pairwise(rows):
        if float(after["share"]) > float(before["share"]) and key in before and key in after:
            count += float(after[key]) > float(before[key]) * (1 + 1e-9)
    return count


def table(rows: list[dict[str, Any]], names: Iterable[str]) -> str:
    """The summary in Markdown."""
    head = "mean / max of time over the bound"
    lines = [
        f"| strategy | cells | interruptible: {head} | whole transfers | program | slower with "
        "more memory |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        found = {model: ratios(rows, name, model) for model in MODELS}
        if not found["paper"]:
            continue
        cols = [f"{statistics.mean(v):.3f} / {max(v):.3f}" for v in found.values()]
        worse = f"{rises(rows, f'{name}|paper')} / {rises(rows, f'{name}|program')}"
        lines.append(f"| {name} | {len(found['paper'])} | {' | '.join(cols)} | {worse} |")
    return "\n".join(lines)


def exceptions(rows: list[dict[str, Any]]) -> str:
    """Where DynProg's set is slower than VDNN's, in the paper's model."""
    both = [r for r in rows if f"{DYNPROG}|paper" in r and f"{VDNN}|paper" in r]
    worse = []
    for r in both:
        ratio = float(r[f"{DYNPROG}|paper"]) / float(r[f"{VDNN}|paper"])
        if ratio > 1 + 1e-9:
            worse.append(
                f"- {r['family']} {r['depth']}, image {r['image']}, batch {r['batch']}, "
                f"budget {r['share']:.0%}: {ratio:.4f}"
            )
    share = 1 - len(worse) / max(1, len(both))
    return "\n".join(
        [f"DynProg is no slower than VDNN in {share:.2%} of {len(both)} cells.", *worse]
    )


def families_table(rows: list[dict[str, Any]]) -> str:
    """Greedy beside DynProg per network family, in the paper's model."""
    lines = ["| family | greedy: mean / max | dynprog: mean / max |", "|---|---|---|"]
    for family in FAMILIES:
        own = [r for r in rows if r["family"] == family]
        cols = []
        for name in ("greedy", DYNPROG):
            values = ratios(own, name, "paper")
            cols.append(f"{statistics.mean(values):.3f} / {max(values):.3f}")
        lines.append(f"| {family} | {' | '.join(cols)} |")
    return "\n".join(lines)


def figures(rows: list[dict[str, Any]], names: Iterable[str], model: str, path: Path) -> None:
    """Ratios over the budget, one panel per network, like the paper's figures 5 to 12."""
    from matplotlib.figure import Figure

    keys = sorted({(r["family"], r["depth"]) for r in rows}, key=str)
    figure = Figure(figsize=(16, 2.6 * -(-len(keys) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(keys) // 4), 4, squeeze=False).ravel()
    for ax, (family, depth) in zip(axes, keys, strict=False):
        own = [r for r in rows if (r["family"], r["depth"]) == (family, depth)]
        own = [r for r in own if r["image"] == 224 and r["batch"] == BATCHES[224][1]]
        for name in names:
            key = f"{name}|{model}"
            points = [(r["share"], r[key] / r["bound_s"]) for r in own if key in r]
            if points:
                ax.plot(*zip(*points, strict=True), marker=".", label=name)
        ax.set_title(f"{family} {depth}, 224×224", fontsize=9)
        ax.set_ylim(0.98, 1.8)
    for ax in axes[len(keys) :]:
        ax.set_axis_off()
    axes[0].legend(fontsize=7)
    figure.supxlabel("budget: 0 the floor, 1 M_peak")
    figure.supylabel(f"time over the lower bound ({model})")
    figure.savefig(path, dpi=70)


def main() -> None:
    """Run and write PREFIX.csv, PREFIX.md and PREFIX_*.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--factory", choices=sorted(FACTORIES), default="analytic")
    parser.add_argument("--out", type=Path, default=Path("docs/results/offload"))
    parser.add_argument("--points", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="one batch size, fast strategies")
    options = parser.parse_args()
    rows = list(cells(FACTORIES[options.factory], V100_PCIE, options.points, options.quick))
    names = list(strategies(options.quick))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with options.out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    text = "\n\n".join([table(rows, names), exceptions(rows), families_table(rows)])
    options.out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    for model in MODELS:
        figures(rows, names, model, options.out.with_name(f"{options.out.name}_{model}.png"))
    print(text)


if __name__ == "__main__":
    main()
