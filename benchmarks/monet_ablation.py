"""MONeT's Figure 4 redone: which kinds of implementations help, on its five models.

    python -m benchmarks.monet_ablation [--folder FOLDER] [--out docs/results/monet_ablation.md]
        [--limit SECONDS] [MODEL ...]

Estimated for the paper's P100 at its batches. Plans are kept in FOLDER, as monet_table1's.
A plan of one kind is one of all kinds, too: that search starts from the best of theirs, and so
never ends with a slower one; theirs start from the plan without kinds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.monet_runs import (
    CASES,
    DEVICE,
    Case,
    Record,
    Runs,
    Started,
    case_of,
    eager_peak_bytes,
    estimated_graph,
)
from memopt.models.presets import find_device
from memopt.programs.instructions import Program
from memopt.strategies.monet.strategy import Choices

SHARES = (0.4, 0.53, 0.65)
"""Budgets over PyTorch's memory; the paper's figure 4 is at 0.53."""
VARIANTS = (Choices.NONE, Choices.CONV, Choices.OUTPUT, Choices.INTERMEDIATE, Choices.ALL)


def rows(case: Case, folder: Path, limit_s: float) -> list[str]:
    """A line for each budget."""
    graph = estimated_graph(case, folder)
    runs = Runs(case.family, graph, folder, limit_s, find_device(DEVICE))
    eager_bytes = eager_peak_bytes(graph)
    lines = []
    for share in SHARES:
        budget = int(share * eager_bytes)
        found: dict[Choices, Record] = {}
        programs: dict[Choices, Program] = {}
        for choices in VARIANTS:
            smaller = VARIANTS if choices is Choices.ALL else (Choices.NONE,)
            first = tuple(programs[c] for c in smaller if c in programs)
            strategy = Started(exact_only=False, choices=choices, known=first)
            found[choices] = runs.solve(strategy, budget)
            program = runs.program(strategy, budget)
            if program is not None:
                programs[choices] = program
        cells = [case.family, f"{share:.2f}"]
        cells += [runs.overhead(found[choices]) for choices in VARIANTS]
        cells.append("yes" if _never_worse(found) else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _never_worse(found: dict[Choices, Record]) -> bool:
    """Whether all together are at least as good as each alone."""
    everything = found[Choices.ALL].time_s
    alone = [r.time_s for c, r in found.items() if c is not Choices.ALL and r.time_s is not None]
    return not alone or (everything is not None and everything <= min(alone) * (1 + 1e-9))


def page(lines: list[str], command: str, limit_s: float) -> str:
    """The whole page."""
    names = [str(choices) for choices in VARIANTS]
    head = [
        "# MONeT's figure 4, estimated",
        "",
        f"`{command}`. Time overhead within shares of PyTorch's memory, estimated for the paper's "
        f"{DEVICE} at its batches (the paper's figure is drawn only, at 0.53). At most {limit_s:g} "
        "s of planning each, on a shared machine.",
        "",
        "none: recomputation only; conv: convolutions' gradients apart and their algorithms; "
        "output: backwards that read other operands; intermediate: packed masks and indices.",
        "",
        f"| model | budget | {' | '.join(names)} | all never worse |",
        "|" + "---|" * (3 + len(names)),
    ]
    return "\n".join([*head, *lines, ""])


def main() -> None:
    """Print the page, and write it after every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-table1"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("models", nargs="*", default=[case.family for case in CASES])
    options = parser.parse_args()
    lines: list[str] = []
    text = ""
    for name in options.models:
        lines += rows(case_of(name), options.folder, options.limit)
        text = page(lines, "python -m benchmarks.monet_ablation", options.limit)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
