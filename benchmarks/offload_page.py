"""The page of `benchmarks.offload_paper`: tables beside the paper's statements, and figures."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.offload_rows import MODELS, Row, by_budget, by_link, ratios, rises, slower

NAMES = ("greedy", "paper's dynprog", "dynprog", "vdnn", "tflms", "autoswap")
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


def page(rows: list[Row], command: str, images: Sequence[Path], without: Sequence[str]) -> str:
    """The whole page; `without`: cases that are not in it."""
    main = [row for row in rows if not row.own and row.link == 1]
    own = [row for row in rows if row.own]
    parts = [
        "# Offloading's experiments (§6), estimated",
        _setting(main, own, command),
        "## Time over the lower bound",
        _table(main),
        _all_sets(main),
        _statements(main),
        "## DynProg and VDNN",
        _exceptions(main),
        "## Families",
        _families(main),
        "## Slower with more",
        _monotonic(main, [row for row in rows if not row.own]),
    ]
    if own:
        parts += ["## DenseNets with memopt's own stages", _own(own)]
    if without:
        parts.append(_missing(without))
    parts += ["## Figures", _captions(images)]
    return "\n\n".join(parts) + "\n"


def _setting(main: Sequence[Row], own: Sequence[Row], command: str) -> str:
    chains = {(r.family, r.depth, r.image, r.batch): r.stages for r in main}
    batches = {image: sorted({k[3] for k in chains if k[2] == image}) for image in (224, 500, 1000)}
    sizes = "; ".join(f"{i}: {', '.join(map(str, found))}" for i, found in batches.items() if found)
    return (
        f"`{command}`. {len(chains)} chains of {min(chains.values())} to {max(chains.values())} "
        f"stages, {len(main)} cells (a chain under a budget; {len(own)} more with other stages). "
        "V100-PCIe in estimate mode (no GPU is involved), one link of 12.2 GB/s for both "
        f"directions, as in the paper. Batch sizes by image size: {sizes}. Budgets: equally "
        "spaced from the floor to M_peak. Solved with 500 slots.\n\n"
        '"paper\'s dynprog" is `DynProg(refine=False)`, Algorithm 1 and nothing else; "dynprog" '
        "is memopt's default, which goes on with a local search for whole transfers. The bound is "
        "max(Proposition 3, fractional optimum), where the paper has Proposition 3 alone: ours is "
        "never smaller.\n\n"
        "Three models of the same decisions: *interruptible* is what the paper's recurrences "
        "price (one link, data moving and memory returning during operations); *whole* its "
        "Problem 1 (memory returns when a transfer ends); *program* what memopt runs (transfers "
        "begin and end at instruction boundaries)."
    )


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} / {max(values):.3f}" if values else "-"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "Mean / largest ratio over the cells in which the strategy has a plan.",
        "",
        "| strategy | cells | " + " | ".join(MODELS) + " |",
        "|" + "---|" * (len(MODELS) + 2),
    ]
    for name in NAMES:
        found = {model: ratios(rows, name, model) for model in MODELS}
        if not found["whole"]:
            continue
        cells = [str(len(found["whole"])), *map(_cell, found.values())]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _all_sets(rows: Sequence[Row]) -> str:
    """How good the local search is where all sets can be tried."""
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
    """The paper's sentences of §6.2 in our words, with what we find."""
    plain, better = (ratios(rows, name, "interruptible") for name in ("paper's dynprog", "dynprog"))
    whole = ratios(rows, "dynprog", "whole")
    both, worse = slower(rows, "greedy", "vdnn", "interruptible")
    tflms = ratios(rows, "tflms", "interruptible")
    possible = [r for r in rows if r.stages <= 128]
    near, same = _autoswap(rows)
    dense = [r for r in rows if r.family == "densenet"]
    gain = [ratios(dense, name, "interruptible") for name in ("greedy", "paper's dynprog")]
    below = sum(value < PAPER_RATIO for value in plain)
    lines = [
        "| the paper (§6.2) | here |",
        "|---|---|",
        f"| DynProg's ratio is consistently below {PAPER_RATIO} | paper's dynprog: "
        f"{below} of {len(plain)} cells below, mean {statistics.mean(plain):.3f}, most "
        f"{max(plain):.3f}; dynprog: mean {statistics.mean(better):.3f}, most {max(better):.3f}; "
        f"with whole transfers {_cell(whole)} |",
        "| Greedy and DynProg outperform VDNN in all cases | DynProg: below; Greedy is slower "
        f"than VDNN in {len(worse)} of {both} cells |",
    ]
    if dense:
        lines.append(
            "| DynProg is nearly optimal on the DenseNets, where Greedy is not | Greedy "
            f"{_cell(gain[0])}, paper's dynprog {_cell(gain[1])} |"
        )
    lines += [
        "| TFLMS cannot go to low memory | it has a plan in "
        f"{len(tflms)} of {len(possible)} cells |",
        f"| AutoSwap often finds Greedy's solution | the same time within 0.1% in {same} of "
        f"{near} cells |",
    ]
    return "\n".join(lines)


def _autoswap(rows: Sequence[Row]) -> tuple[int, int]:
    pairs = [
        (row.times_s["autoswap"][0], row.times_s["greedy"][0])
        for row in rows
        if "autoswap" in row.times_s and "greedy" in row.times_s
    ]
    return len(pairs), sum(abs(a - b) <= 1e-3 * b for a, b in pairs)


def _exceptions(rows: Sequence[Row]) -> str:
    """Where DynProg is slower than VDNN, model by model."""
    lines = ["| | no slower than VDNN | worst |", "|---|---|---|"]
    listed: list[str] = []
    for name, model in itertools.product(("paper's dynprog", "dynprog"), MODELS):
        both, worse = slower(rows, name, "vdnn", model)
        if not both:
            continue
        most = max((quotient for _, quotient in worse), default=1.0)
        lines.append(f"| {name}, {model} | {1 - len(worse) / both:.2%} of {both} | {most:.4f} |")
        # What the paper compares, and all of what memopt runs.
        if name == "dynprog" or model == MODELS[0]:
            listed += [f"- {name}, {model}: {row}: {quotient:.4f}" for row, quotient in worse]
    theirs = [ratios(rows, "vdnn", model) for model in MODELS]
    lines += [
        "",
        "As programs VDNN's decisions are faster than in its own model (mean "
        + " → ".join(f"{statistics.mean(found):.3f}" for found in theirs)
        + "): a program copies only what it must release, which prunes their generous sets. The "
        "paper's set is chosen for transfers that can be interrupted and has nothing to prune; "
        "`dynprog` searches on with whole transfers.",
    ]
    if listed:
        lines += ["", "The exceptions of paper's dynprog, interruptible, and of dynprog:"]
        lines += ["", *listed]
    return "\n".join(lines)


def _families(rows: Sequence[Row]) -> str:
    head = ("greedy", "paper's dynprog", "dynprog", "vdnn")
    lines = [
        "Mean / largest ratio in the interruptible model; dynprog also as programs.",
        "",
        "| network | image | stages | " + " | ".join(head) + " | dynprog: program |",
        "|" + "---|" * (len(head) + 4),
    ]
    keys = dict.fromkeys((r.network, r.image, r.stages) for r in rows)
    for network, image, stages in keys:
        found = [r for r in rows if (r.network, r.image, r.stages) == (network, image, stages)]
        cells = [_cell(ratios(found, name, "interruptible")) for name in head]
        cells.append(_cell(ratios(found, "dynprog", "program")))
        lines.append(f"| {network} | {image} | {stages} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _monotonic(main: Sequence[Row], linked: Sequence[Row]) -> str:
    links = ", ".join(f"{12.2 * link:.1f}" for link in sorted({r.link for r in linked}))
    parts = [
        "How often the same chain takes longer with the next larger budget, or with the next "
        f"faster link ({links} GB/s, 224x224). The optimum never does, nor do the exact solver, "
        "the fractional one and DynProg without rounding (tests/offload); rounded to slots, and "
        "for heuristics, it may happen."
    ]
    for what, series in (("budget", by_budget(main)), ("link", by_link(linked))):
        lines = [
            f"| {what}: slower, of steps | " + " | ".join(MODELS) + " |",
            "|" + "---|" * (len(MODELS) + 1),
        ]
        for name in NAMES:
            counts = [rises(series, name, model) for model in MODELS]
            if counts[0][1]:
                lines.append(f"| {name} | {' | '.join(f'{a} of {b}' for a, b in counts)} |")
        if len(lines) > 2:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _own(rows: Sequence[Row]) -> str:
    return (
        "The paper's virtual layers make a dense layer one stage. memopt finds four, so that a "
        f"chain has {min(r.stages for r in rows)} to {max(r.stages for r in rows)} stages, and "
        "500 slots are few for so many activations: the paper, too, finds that its rounding "
        "costs most on deep networks (§7).\n\n" + _table(rows) + "\n\n" + _exceptions(rows)
    )


def _missing(without: Sequence[str]) -> str:
    """Cases that were not run, by image, batch and link."""
    models: dict[str, list[str]] = {}
    for name in without:
        model, _, what = name.partition(":")
        models.setdefault(what, []).append(model)
    lines = [f"- {what}: {', '.join(found)}" for what, found in models.items()]
    return "Not in this run (image : batch : own stages or link):\n\n" + "\n".join(lines)


def _captions(images: Sequence[Path]) -> str:
    return "\n\n".join(f"![{image.stem.replace('_', ' ')}]({image.name})" for image in images)


def pictures(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write the figures beside `out`; their paths, in the paper's order."""
    main = [row for row in rows if not row.own and row.link == 1]
    groups: list[tuple[str, list[Row]]] = []
    small = [r for r in main if r.image == 224]
    largest = {r.network: max(x.batch for x in small if x.network == r.network) for r in small}
    groups.append(("fig5", [r for r in small if r.batch == largest[r.network]]))
    number = 6
    for family in ("resnet", "densenet"):
        for image in (224, 500, 1000):
            own = [r for r in main if (r.family, r.image) == (family, image)]
            groups.append((f"fig{number}", own))
            number += 1
    groups.append(("fig12", [r for r in main if r.family == "inception"]))
    written = []
    for name, found in groups:
        if found:
            path = out.with_name(f"{out.stem}_{name}.png")
            _figure(found, path, scaled=name != "fig5")
            written.append(path)
    return written


def _figure(rows: Sequence[Row], path: Path, *, scaled: bool) -> None:
    """Ratio over budget, a panel for each chain."""
    keys = list(dict.fromkeys((r.network, r.image, r.batch) for r in rows))
    if scaled:
        keys.sort(key=lambda key: (key[1], key[2]))
    across = min(5, len(keys))
    down = -(-len(keys) // across)
    figure = Figure(figsize=(2.7 * across, 2.2 * down + 0.6), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for ax, key in zip(axes, keys, strict=False):
        found = [r for r in rows if (r.network, r.image, r.batch) == key]
        _panel(ax, found, scaled=scaled)
        ax.set_title(f"{key[0]}, {key[1]}², batch {key[2]}", fontsize=8)
        ax.tick_params(labelsize=7)
    for ax in axes[len(keys) :]:
        ax.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=7, fontsize=8)
    budget = "0% the floor, 100% M_peak" if scaled else "GiB, resident included"
    figure.supxlabel(f"budget: {budget}", fontsize=8)
    figure.supylabel("time over the bound", fontsize=8)
    figure.savefig(path, dpi=75)


def _panel(ax: Axes, rows: Sequence[Row], *, scaled: bool) -> None:
    def at(row: Row) -> float:
        return 100 * row.share if scaled else row.budget_bytes / 2**30

    for name in NAMES:
        points = [(at(r), found) for r in rows if (found := r.ratio(name, MODELS[0])) is not None]
        ax.plot(
            [x for x, _ in points],
            [y for _, y in points],
            STYLES[name],
            label=name,
            linewidth=1,
            markersize=4,
        )
    program = [(at(r), found) for r in rows if (found := r.ratio("dynprog", "program")) is not None]
    ax.plot(
        [x for x, _ in program], [y for _, y in program], "k--", linewidth=0.8, label="its program"
    )
    ax.set_ylim(0.98, 1.6)
