"""Stage menus beside plain Rotor on the zoo's models (estimated for an H100, batch 32).

    python -m benchmarks.monet_menus [--folder FOLDER] [--out FILE] [family ...]

Graphs are captured once, without a loss function, with their exact implementations, and kept in
FOLDER. The bound is what no plan with these implementations and without transfers beats.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from memopt.implementations import with_implementations
from memopt.models.graph import Graph
from memopt.models.judge import judge
from memopt.models.liveness import store_all
from memopt.models.presets import find_device
from memopt.models.replay import replay
from memopt.models.serialize import dumps, loads
from memopt.profiler.estimate import estimate_model
from memopt.strategies.monet.menus import RotorMenus
from tests.zoo import FAMILIES, get

DEVICE = "H100"
BATCH = 32
SHARES = (0.5, 0.35)


def estimated_graph(name: str, folder: Path) -> Graph:
    """The graph of a model's step at its published size, read from `folder` if it is there."""
    path = folder / f"{name}-b{BATCH}-exact.json"
    if path.exists():
        found = loads(path.read_bytes())
        if isinstance(found, Graph):
            return found
    family = get(name)
    with torch.device("meta"):
        model = family.build("paper")
    inputs = family.inputs("paper", batch=BATCH)
    device = find_device(DEVICE)
    profiled = estimate_model(model, inputs, device)
    graph = with_implementations(profiled, exact_only=True, device=device).graph
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dumps(graph))
    return graph


def row(name: str, folder: Path) -> str:
    """One line of the table."""
    graph = estimated_graph(name, folder)
    base = replay(graph, store_all(graph))
    cells = [name, f"{base.peak_bytes / 2**30:.2f}"]
    for share in SHARES:
        budget = int(share * base.peak_bytes)
        begin = time.perf_counter()
        solution = RotorMenus().solve(graph, budget)
        seconds = time.perf_counter() - begin
        plain = solution.stats["rotor_s"]
        assert isinstance(plain, float)
        found = solution.time_s
        if solution.program is not None:
            assert judge(graph, None, solution.program, budget, None)[0] is None
        least = solution.smallest_budget_bytes
        cells.append("none" if plain == float("inf") else f"+{plain / base.time_s - 1:.1%}")
        if found is None:
            known = "" if least is None else f" (from {least / base.peak_bytes:.2f})"
            cells += [f"none{known}", "", ""]
        else:
            assert solution.lower_bound_s is not None
            ratio = (found - base.time_s) / (plain - base.time_s)
            cells.append(f"{found / base.time_s - 1:+.1%}")
            cells.append(f"{ratio:.2f}")
            cells.append(f"{solution.lower_bound_s / base.time_s - 1:+.1%}")
        cells.append(f"{seconds:.0f}")
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    """Print the table, line by line, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-graphs"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("families", nargs="*", default=[family.name for family in FAMILIES])
    options = parser.parse_args()
    head = "| model | peak GiB |"
    for share in SHARES:
        head += f" Rotor at {share} | menus | share of Rotor's | bound | s |"
    page = f"{head}\n|" + "---|" * (2 + 5 * len(SHARES)) + "\n"
    sys.stdout.write(page)
    for name in options.families:
        line = row(name, options.folder)
        sys.stdout.write(line)
        sys.stdout.flush()
        page += line
        if options.out is not None:
            title = "# Rotor and stage menus on the families\n\n"
            title += f"Time overhead, batch {BATCH}, estimated for {DEVICE} "
            title += "(`python -m benchmarks.monet_menus`).\n\n"
            options.out.write_text(title + page)


if __name__ == "__main__":
    main()
