"""MONeT on graphs too large for its exact program, with and without the search over windows.

    python -m benchmarks.monet_windows [--limit SECONDS] [--folder FOLDER] [family ...]

Random training steps of 35 forward operators (about 70 in all, as in tests/monet), and the families
named, estimated for an H100 as in `benchmarks.monet_scale`; budgets are shares of the peak. Both
searches have the same time limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from unittest.mock import patch

from benchmarks.monet_menus import estimated_graph
from memopt.models.graph import Graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies.monet import strategy
from tests.monet.graphs import training_graph

SHARES = (0.55, 0.7)
SEEDS = range(3)
OPERATORS = 35
HEAD = "| graph | share of the peak | bound | without windows | with windows | by |\n" + "|---" * 6


def row(name: str, graph: Graph, share: float, limit_s: float) -> str:
    """The times of both plans over that of the step without a budget."""
    base = replay(graph, store_all(graph))
    budget = int(share * base.peak_bytes)
    with patch.object(strategy, "search_windows", lambda *_: 0):
        without = strategy.Monet().solve(graph, budget, time_limit_s=limit_s)
    found = strategy.Monet().solve(graph, budget, time_limit_s=limit_s)

    def overhead(time_s: float | None) -> str:
        return "none" if time_s is None else f"{time_s / base.time_s - 1:+.2%}"

    cells = [name, f"{share}", overhead(found.lower_bound_s), overhead(without.time_s)]
    cells += [overhead(found.time_s), str(found.stats.get("chosen"))]
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-graphs"))
    parser.add_argument("--limit", type=float, default=8.0)
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    graphs = {
        f"random {seed}": training_graph(Random(seed), OPERATORS, seed % 2 == 0) for seed in SEEDS
    }
    graphs |= {name: estimated_graph(name, options.folder) for name in options.families}
    sys.stdout.write(f"{HEAD}|\n")
    for name, graph in graphs.items():
        for share in SHARES:
            sys.stdout.write(row(name, graph, share, options.limit))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
