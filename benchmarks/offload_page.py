"""The page of `benchmarks.offload_paper`: sums over its rows, tables beside the paper's statements,
figures."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.pictures import panels
from benchmarks.table import GIB, joined, table

MODELS = ("interruptible", "whole", "program")
"""The paper's model with interruptible and with whole transfers, and memopt's programs."""
NAMES = ("greedy", "paper's dynprog", "dynprog", "vdnn", "tflms", "autoswap")
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
    rows: Iterable[Row], name: str, other: str, model: str, tolerance: float = 1e-9
) -> tuple[int, list[tuple[Row, float]]]:
    """Count the rows in which both have plans, and give those where `name` is slower, with the
    quotient."""
    both = 0
    found = []
    for row in rows:
        mine, others = row.ratio(name, model), row.ratio(other, model)
        if mine is None or others is None:
            continue
        both += 1
        if mine > others * (1 + tolerance):
            found.append((row, mine / others))
    return both, found


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
    shown: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        if round(10 * row.share) % 2:
            continue
        found = [row.times_s.get(name) for name in SHOWN]
        cells = ["-" if one is None else f"{row.batch / one[0]:.4g}" for one in found]
        shown.setdefault((row.network, row.image, row.batch), []).append(" / ".join(cells))
    return joined(
        f"Images per second, {' / '.join(SHOWN)}, in the paper's model (interruptible transfers).",
        table("network | image | batch | floor | 20% | 40% | 60% | 80% | M_peak",
              [(*key, *cells) for key, cells in shown.items()]),
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
    for name, model in itertools.product(("paper's dynprog", "dynprog"), MODELS):
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
    for key in dict.fromkeys((r.network, r.image, r.stages) for r in rows):
        found = [r for r in rows if (r.network, r.image, r.stages) == key]
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
    kinds = itertools.product(("resnet", "densenet"), (224, 500, 1000))
    for number, kind in enumerate(kinds, 6):
        groups[f"fig{number}"] = [r for r in main if (r.family, r.image) == kind]
    groups["fig12"] = [r for r in main if r.family == "inception"]
    for name, found in groups.items():
        if found and (name != "fig5" or not given.throughput):
            number = int(name[3:]) + (THROUGHPUT_FROM if given.throughput else 0)
            path = out.with_name(f"{out.stem}_fig{number}.png")
            _figure(found, path, scaled=name != "fig5", throughput=given.throughput)


def _figure(rows: Sequence[Row], path: Path, *, scaled: bool, throughput: bool) -> None:
    keys = list(dict.fromkeys((r.network, r.image, r.batch) for r in rows))
    if scaled:
        keys.sort(key=lambda key: (key[1], key[2]))
    across = min(5, len(keys))
    budget = "0% the floor, 100% M_peak" if scaled else "GiB, resident included"
    how = {"across": across, "size": (2.7, 2.3), "dpi": 75, "legend": "outside upper center"}
    with panels(path, len(keys), **how) as axes:
        for ax, key in zip(axes, keys, strict=True):
            found = [r for r in rows if (r.network, r.image, r.batch) == key]
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
