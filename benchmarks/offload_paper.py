"""Offloading §6 again: ratios to the best lower bound, as one page with its figures.

Every network, image size and batch size is planned at budgets from its floor to M_peak, in estimate
mode; with `--throughput` the first batch size alone, for images per second. For every strategy
three times are compared with max(Proposition 3, fractional optimum): the paper's model with
interruptible transfers, the same with whole transfers, and the program memopt runs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.graphs import chain_of
from benchmarks.pictures import panels
from benchmarks.runner import Benchmark
from benchmarks.table import GIB, by, joined, table
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.status import Status
from memopt.strategies.base import Strategy
from memopt.strategies.offload import AutoSwap, DynProg, Greedy, Tflms, Vdnn
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import OffloadProblem, offload_problem
from memopt.strategies.rotor.grouping import grouped

FAMILIES = {"resnet": (18, 34, 50, 101, 152), "densenet": (121, 161, 169, 201), "inception": (3,)}
BATCHES = {224: (8, 32), 500: (8, 2), 1000: (8, 2)}
"""Powers of two; the paper names only 32 images of 224x224 (Figure 5)."""
MOST_TFLMS_STAGES = 128
"""The exhaustive search of TFLMS's two parameters takes L^4 steps."""
V100 = Device(name="V100-PCIe", to_host_bytes_per_s=12.2e9, duplex=False)
"""The paper's (§6.1): one link of 12.2 GB/s for both directions."""
MOST_MOVABLE = 12
"""Up to so many activations all sets are tried, too."""
MODELS = ("interruptible", "whole", "program")
"""The paper's model with interruptible and with whole transfers, and memopt's programs."""
SHOWN, THROUGHPUT_FROM = ("greedy", "paper's dynprog", "vdnn", "autoswap"), 7
"""In the table of throughput, whose figures have numbers that are so much larger."""
PAPER_RATIO = 1.2
"""§6.2: DynProg's ratio is "consistently" below it."""
STYLES = {
    "greedy": "C0.-",
    "paper's dynprog": "C3.-",
    "dynprog": "C1.-",
    "vdnn": "C2.-",
    "tflms": "C5x",
    "autoswap": "C4:",
}
NAMES = tuple(STYLES)


@dataclass(frozen=True)
class Case:
    """One chain, by memopt's `own` stages or the paper's."""

    family: str
    depth: int
    image: int
    batch: int
    own: bool = False

    @property
    def model(self) -> str:
        return "inception_v3" if self.family == "inception" else f"{self.family}{self.depth}"

    def __str__(self) -> str:
        return f"{self.model}:{self.image}:b{self.batch}{':own' * self.own}"


@dataclass(frozen=True, kw_only=True)
class Row(Case):
    """One chain under one budget.

    Attributes:
        stages: of the chain, the loss included.
        share: of the way from the floor to M_peak.
        budget_bytes: total, resident included.
        bound_s: max(Proposition 3, fractional optimum).
        times_s: strategy → time in each of `MODELS`; absent: no plan.
        best_whole_s: the least time of all sets of activations, ordered, with whole transfers;
            None: too many sets to try.
    """

    stages: int
    share: float
    budget_bytes: int
    bound_s: float
    times_s: dict[str, list[float]]
    best_whole_s: float | None

    @property
    def network(self) -> str:
        names = {"resnet": "ResNet-", "densenet": "DenseNet-", "inception": "Inception-v"}
        return f"{names[self.family]}{self.depth}"

    def ratio(self, name: str, model: str) -> float | None:
        """Give a strategy's time over the bound; None where it has no plan."""
        times = self.times_s.get(name)
        return None if times is None else times[MODELS.index(model)] / self.bound_s

    def __str__(self) -> str:
        return f"{self.network}, {self.image}x{self.image}, batch {self.batch}, {self.share:.0%}"


def ratios(rows: Iterable[Row], name: str, model: str) -> list[float]:
    """Give the times over the bound where the strategy has a plan."""
    return [found for row in rows if (found := row.ratio(name, model)) is not None]


def slower(
    rows: Iterable[Row], name: str, other: str, model: str
) -> tuple[int, list[tuple[Row, float]]]:
    """Count the rows in which both have plans, and give those where `name` is slower, with the
    quotient."""
    quotients = [
        (row, mine / others)
        for row in rows
        if (mine := row.ratio(name, model)) and (others := row.ratio(other, model))
    ]
    return len(quotients), [one for one in quotients if one[1] > 1 + 1e-9]


def paper_stages(chain: Chain) -> Chain:
    """Merge "each non-linear part in a virtual layer" (§6.1): a dense layer is one stage.

    memopt finds four stages in a dense layer x ↦ cat(x, f(x)): the state between them is x and
    what f has made so far. Other networks have the paper's stages already.
    """
    inside = re.compile(r"denseblock\d+\.denselayer")
    ends = [i for i, stage in enumerate(chain.stages, 1) if not inside.search(stage.name)]
    return grouped(chain, tuple(ends))


def cases() -> Iterator[Case]:
    """Give all of §6.1 with one batch size and the other and with memopt's stages."""
    networks = [(family, depth) for family, depths in FAMILIES.items() for depth in depths]
    for number, network, image in product(range(2), networks, BATCHES):
        yield Case(*network, image, BATCHES[image][number])
    for network, image in product(networks, BATCHES):
        if network[0] == "densenet":
            yield Case(*network, image, BATCHES[image][0], own=True)


def strategies(case: Case, stages: int) -> dict[str, Strategy]:
    """Choose what is compared; the slow yardsticks where the paper has them."""
    found: dict[str, Strategy] = {
        "greedy": Greedy(),
        "paper's dynprog": DynProg(refine=False),
        "dynprog": DynProg(),
        "vdnn": Vdnn(),
    }
    if stages <= MOST_TFLMS_STAGES:
        found["tflms"] = Tflms()
    if not case.own:
        found["autoswap"] = AutoSwap(trials=40)
    return found


def measured(given: Any, case: Case) -> list[Row]:
    """Plan a chain at equally spaced budgets."""
    chain, last = chain_of(case.model, case.image, case.batch), given.points - 1
    chain = chain if case.own else paper_stages(chain)
    return [solve(case, chain, index / last) for index in range(given.points)]


def solve(case: Case, chain: Chain, share: float) -> Row:
    """Compare the times of all strategies at one budget: floor + share·(M_peak - floor)."""
    problem = offload_problem(chain, None, V100)
    floor, peak = problem.floor_bytes, problem.peak_bytes
    budget = chain.resident_bytes + floor + round(share * (peak - floor))
    bound_s, times_s = problem.compute_time_s, {}
    for name, strategy in strategies(case, len(chain)).items():
        found = strategy.solve(chain, budget, device=V100)
        if found.status is Status.INFEASIBLE:
            continue
        assert found.peak_bytes <= budget
        stats: dict[str, Any] = dict(found.stats)
        bound_s = max(stats["proposition_3_s"], stats["fractional_optimum_s"])
        times_s[name] = [stats["paper_time_s"], stats["paper_whole_time_s"], found.time_s]
    best = best_whole_s(offload_problem(chain, budget, V100))
    figures = {"bound_s": bound_s, "times_s": times_s, "best_whole_s": best}
    return Row(**vars(case), stages=len(chain), share=share, budget_bytes=budget, **figures)


def best_whole_s(problem: OffloadProblem) -> float | None:
    """Find the least ordered makespan with whole transfers of all sets; None: they are too many."""
    movable = np.flatnonzero(problem.movable)
    if len(movable) > MOST_MOVABLE:
        return None
    sets = product((False, True), repeat=len(movable))
    times = (makespan_s(problem, problem.amounts(movable[list(one)]), whole=True) for one in sets)
    return min(times)


def blocks(rows: list[Row], given: Any) -> dict[str, str]:
    """Make all tables of the page."""
    main = [row for row in rows if not row.own]
    if given.throughput:
        return {"results": _throughput(main)}
    own = [row for row in rows if row.own]
    if not main:
        return {"results": "No case of the paper's own setting: no tables."}
    return {
        "results": joined(_setting(main, own), _table(main), _all_sets(main), _statements(main)),
        "exceptions": _exceptions(main),
        "families": _families(main),
        "own": joined(_table(own), _exceptions(own)) if own else "",
    }


def _throughput(rows: Sequence[Row]) -> str:
    def cell(row: Row) -> str:
        times = [row.times_s.get(name) for name in SHOWN]
        return " / ".join("-" if one is None else f"{row.batch / one[0]:.4g}" for one in times)

    shown = by((row for row in rows if not round(10 * row.share) % 2), "network", "image", "batch")
    return joined(
        f"Images per second, {' / '.join(SHOWN)}, in the paper's model (interruptible transfers).",
        table("network | image | batch | floor | 20% | 40% | 60% | 80% | M_peak",
              [(*key, *map(cell, found)) for key, found in shown.items()]),
    )  # fmt: skip


def _setting(main: Sequence[Row], own: Sequence[Row]) -> str:
    chains = {(r.family, r.depth, r.image, r.batch): r.stages for r in main}
    batches = {image: sorted({k[3] for k in chains if k[2] == image}) for image in (224, 500, 1000)}
    sizes = "; ".join(f"{i}: {', '.join(map(str, found))}" for i, found in batches.items() if found)
    return (
        f"{len(chains)} chains of {min(chains.values())} to {max(chains.values())} stages, "
        f"{len(main)} cells (a chain under a budget; {len(own)} more with other stages). Batch "
        f"sizes by image size: {sizes}."
    )


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} / {max(values):.3f}" if values else "-"


def _table(rows: Sequence[Row]) -> str:
    found = {name: [ratios(rows, name, model) for model in MODELS] for name in NAMES}
    return table(
        "strategy | cells | " + " | ".join(MODELS),
        [(name, len(each[1]), *map(_cell, each)) for name, each in found.items() if each[1]],
    )


def _all_sets(rows: Sequence[Row]) -> str:
    """Say how good the local search is where all sets can be tried."""
    tried = [
        (row, row.best_whole_s) for row in rows if row.best_whole_s and "dynprog" in row.times_s
    ]
    if not tried:
        return "No chain is short enough to try all sets of activations."
    over = [best / row.bound_s for row, best in tried]
    found = [row.times_s["dynprog"][MODELS.index("whole")] / best for row, best in tried]
    names = ", ".join(dict.fromkeys(row.network for row, _ in tried))
    return (
        f"On the shortest chains ({names}, {len(tried)} cells) all sets of activations were tried: "
        f"with whole transfers in order the best one takes {_cell(over)} of the bound, and "
        f"dynprog's {_cell(found)} of the best one."
    )


def _statements(rows: Sequence[Row]) -> str:
    """Set the paper's sentences of §6.2, in our words, beside what we find."""
    plain, better = (ratios(rows, name, "interruptible") for name in ("paper's dynprog", "dynprog"))
    both, worse = slower(rows, "greedy", "vdnn", "interruptible")
    pairs = [
        (row.times_s["autoswap"][0], row.times_s["greedy"][0])
        for row in rows
        if {"autoswap", "greedy"} <= row.times_s.keys()
    ]
    dense = [r for r in rows if r.family == "densenet"]
    gain = [_cell(ratios(dense, n, "interruptible")) for n in ("greedy", "paper's dynprog")]
    return table(
        "the paper (§6.2) | here",
        [
            f"DynProg's ratio is consistently below {PAPER_RATIO} | paper's dynprog: "
            f"{sum(value < PAPER_RATIO for value in plain)} of {len(plain)} cells below, mean / "
            f"most {_cell(plain)}; dynprog: {_cell(better)}; with whole transfers "
            f"{_cell(ratios(rows, 'dynprog', 'whole'))}",
            "Greedy and DynProg outperform VDNN in all cases | DynProg: below; Greedy is slower "
            f"than VDNN in {len(worse)} of {both} cells",
            "DynProg is nearly optimal on the DenseNets, where Greedy is not | Greedy "
            f"{gain[0]}, paper's dynprog {gain[1]}",
            "TFLMS cannot go to low memory | it has a plan in "
            f"{len(ratios(rows, 'tflms', 'interruptible'))} of "
            f"{sum('tflms' in row.times_s or row.stages <= 128 for row in rows)} cells",
            "AutoSwap often finds Greedy's solution | the same time within 0.1% in "
            f"{sum(abs(a - b) <= 1e-3 * b for a, b in pairs)} of {len(pairs)} cells",
        ],
    )


def _exceptions(rows: Sequence[Row]) -> str:
    """Say where DynProg is slower than VDNN, model by model."""
    lines: list[str] = []
    listed: list[str] = []
    for name, model in product(("paper's dynprog", "dynprog"), MODELS):
        both, worse = slower(rows, name, "vdnn", model)
        if not both:
            continue
        most = max((quotient for _, quotient in worse), default=1.0)
        lines.append(f"{name}, {model} | {1 - len(worse) / both:.2%} of {both} | {most:.4f}")
        # What the paper compares, and all of what memopt runs.
        if name == "dynprog" or model == MODELS[0]:
            listed += [f"- {name}, {model}: {row}: {quotient:.4f}" for row, quotient in worse]
    means = [f"{statistics.mean(ratios(rows, 'vdnn', model)):.3f}" for model in MODELS]
    return joined(
        table(" | no slower than VDNN | worst", lines),
        f"VDNN's mean ratio, in each model: {' → '.join(means)}.",
        "The exceptions of paper's dynprog, interruptible, and of dynprog:" if listed else "",
        "\n".join(listed),
    )


def _families(rows: Sequence[Row]) -> str:
    head = ("greedy", "paper's dynprog", "dynprog", "vdnn")
    lines = []
    for key, found in by(rows, "network", "image", "stages").items():
        cells = [_cell(ratios(found, name, "interruptible")) for name in head]
        lines.append((*key, *cells, _cell(ratios(found, "dynprog", "program"))))
    return table(f"network | image | stages | {' | '.join(head)} | dynprog: program", lines)


def pictures(rows: list[Row], given: Any) -> None:
    """Draw the paper's figures 5 to 12 beside the page, or with `throughput` 13 to 19."""
    out: Path = given.out
    main = [row for row in rows if not row.own]
    small = [r for r in main if r.image == 224]
    largest = {r.network: max(x.batch for x in small if x.network == r.network) for r in small}
    groups = {"fig5": [r for r in small if r.batch == largest[r.network]]}
    kinds = product(("resnet", "densenet"), (224, 500, 1000))
    for number, kind in enumerate(kinds, 6):
        groups[f"fig{number}"] = [r for r in main if (r.family, r.image) == kind]
    groups["fig12"] = [r for r in main if r.family == "inception"]
    for name, found in groups.items():
        if found and (name != "fig5" or not given.throughput):
            number = int(name[3:]) + (THROUGHPUT_FROM if given.throughput else 0)
            path = out.with_name(f"{out.stem}_fig{number}.png")
            _figure(found, path, scaled=name != "fig5", throughput=given.throughput)


def _figure(rows: Sequence[Row], path: Path, *, scaled: bool, throughput: bool) -> None:
    shown = list(by(rows, "network", "image", "batch").items())
    if scaled:
        shown.sort(key=lambda one: one[0][1:])
    across = min(5, len(shown))
    budget = "0% the floor, 100% M_peak" if scaled else "GiB, resident included"
    how = {"across": across, "size": (2.7, 2.3), "dpi": 75, "legend": "outside upper center"}
    with panels(path, len(shown), **how) as axes:
        for ax, (key, found) in zip(axes, shown, strict=True):
            _panel(ax, found, scaled=scaled, throughput=throughput)
            ax.set_title(f"{key[0]}, {key[1]}², batch {key[2]}", fontsize=8)
            ax.tick_params(labelsize=7)
        axes[0].figure.supxlabel(f"budget: {budget}", fontsize=8)
        what = "images/s" if throughput else "time over the bound"
        axes[0].figure.supylabel(what, fontsize=8)


def _panel(ax: Axes, rows: Sequence[Row], *, scaled: bool, throughput: bool) -> None:
    def draw(name: str, model: str, style: str, label: str, width: float = 1.0) -> None:
        points = [
            (
                100 * row.share if scaled else row.budget_bytes / GIB,
                row.batch / (found * row.bound_s) if throughput else found,
            )
            for row in rows
            if (found := row.ratio(name, model)) is not None
        ]
        x, y = [x for x, _ in points], [y for _, y in points]
        ax.plot(x, y, style, label=label, linewidth=width, markersize=4)

    for name in NAMES:
        draw(name, MODELS[0], STYLES[name], name)
    draw("dynprog", "program", "k--", "its program", 0.8)
    if not throughput:
        ax.set_ylim(0.98, 1.6)


BENCHMARK = Benchmark(
    row=Row,
    cases=lambda given: {str(x): (x,) for x in islice(cases(), 30 if given.throughput else None)},
    measure=measured,
    blocks=blocks,
    options={"points": 11, "throughput": False},
    pictures=pictures,
)
