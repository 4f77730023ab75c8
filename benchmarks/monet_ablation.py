"""MONeT's Figure 4 redone: which kinds of implementations help, on its five models.

Estimated for the paper's P100 at its batches. A plan of one kind is one of all kinds, too: that
search starts from the best of theirs, and so never ends with a slower one; theirs start from the
plan without kinds.
"""

from __future__ import annotations

from typing import Any

from benchmarks.monet_runs import CASES, P100, Case, Runs, Started, eager_peak_bytes
from benchmarks.runner import Benchmark, Line
from benchmarks.table import signed
from memopt.programs.instructions import Program
from memopt.strategies.monet.strategy import Choices

SHARES = (0.4, 0.53, 0.65)
"""Budgets over PyTorch's memory; the paper's figure 4 is at 0.53."""
VARIANTS = (Choices.NONE, Choices.CONV, Choices.OUTPUT, Choices.INTERMEDIATE, Choices.ALL)


def _planned(given: Any, case: Case) -> list[Line]:
    graph = case.graph()
    runs = Runs(case.family, graph, given.limit, P100)
    lines = []
    for share in SHARES:
        budget = int(share * eager_peak_bytes(graph))
        programs: dict[Choices, Program] = {}
        overheads: list[float | None] = []
        for choices in VARIANTS:
            smaller = VARIANTS if choices is Choices.ALL else (Choices.NONE,)
            first = tuple(programs[c] for c in smaller if c in programs)
            strategy = Started(exact_only=False, choices=choices, known=first)
            time_s = runs.solve(strategy, budget).time_s
            overheads.append(None if time_s is None else time_s / runs.base_s - 1)
            program = runs.program(strategy, budget)
            if program is not None:
                programs[choices] = program
        *alone, every = overheads
        least = min((one for one in alone if one is not None), default=None)
        best = least is None or (every is not None and every <= least + 1e-9)
        cells = " | ".join(signed(one, none="none") for one in overheads)
        lines.append(Line(f"{case.family} | {share:.2f} | {cells} | {'yes' if best else 'no'}"))
    return lines


BENCHMARK = Benchmark(
    cases={case.family: (case,) for case in CASES},
    measure=_planned,
    head=f"model | budget | {' | '.join(map(str, VARIANTS))} | all never worse",
    options={"limit": 20.0},
)
