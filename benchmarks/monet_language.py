"""Language models with MONeT's implementations: chunked loss, packed masks, recomputed attention.

GPT-2 and a Llama shape with their loss in the module, so that the logits are the plan's to leave
out, estimated for an H100 at batch 32 × 512 tokens. What really runs on a CPU is `monet_real`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.graphs import H100, LOSS, step_graph
from benchmarks.monet_runs import Runs
from benchmarks.runner import Benchmark, Line, named
from benchmarks.table import gib
from memopt.strategies.base import Strategy
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.rotor import Rotor

OVERHEAD = 0.1
Way = Callable[[Runs, int], Strategy]
"""The strategy for a budget."""
MODELS = ("gpt2", "llama")
EXACT, MENUS, ALL_MENUS = Monet(), RotorMenus(), RotorMenus(exact_only=False)
WAYS: dict[str, Way] = {
    "Rotor": lambda _runs, _budget: Rotor(),
    "rotor-menus": lambda _runs, _budget: MENUS,
    "MONeT, exact": lambda _runs, _budget: EXACT,
    "MONeT": lambda runs, budget: runs.started(budget, ALL_MENUS, MENUS, EXACT),
}
"""The last starts from the plans of the two before it, and of menus with all implementations."""


def _planned(given: Any, name: str) -> list[Line]:
    runs = Runs(name + LOSS, step_graph(name + LOSS, exact=False), given.limit, H100)
    lines, rotor_bytes = [], 0
    for way, strategy_at in WAYS.items():
        found = runs.memory_at(partial(strategy_at, runs), OVERHEAD)
        start, size = f"{name} | {gib(runs.base_bytes)} | {way}", found and found.peak_bytes
        if found is None or not size:
            lines.append(Line(f"{start} | none |  |  |  | "))
            continue
        rotor_bytes = rotor_bytes or size
        lines.append(
            Line(
                f"{start} | {gib(size, 2)} ({size / runs.base_bytes:.2f}) | "
                f"{size / rotor_bytes:.2f} | {runs.overhead(found)} | {found.planning_s:.0f} | "
                f"{found.chosen or 'none'}"
            )
        )
    return lines


BENCHMARK = Benchmark(
    cases=named(MODELS),
    measure=_planned,
    head="model | GiB without | strategy | at 10% | over Rotor's | overhead | s | chosen",
    options={"limit": 30.0},
)
