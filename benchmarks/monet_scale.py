"""MONeT's plans of whole models beside their proved bound and Rotor's plan, within a time limit.

    python -m benchmarks.monet_scale [--folder FOLDER] [--out FILE] [--limit SECONDS] [--note TEXT]
        [family ...]

Estimated for an H100, batch 32, exact implementations. Budgets are floor + share·(peak − floor),
floor being Rotor's smallest. The bound holds for every plan with these implementations, without
transfers, that runs the backward in the graph's order.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.monet_menus import BATCH, DEVICE, estimated_graph
from memopt.api.planning import solve
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import Rotor
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.shared.chain_programs import rotor_programs

FAMILIES = ("resnet50", "googlenet", "unet", "vgg16", "mobilenet_v2")
SHARES = (0.25, 0.5, 0.75)
HEAD = "| model | operators | share | GiB | Rotor | monet | bound | gap | s | CPU s | by |\n"


def rows(name: str, folder: Path, limit_s: float, shares: list[float]) -> str:
    """The lines of one model."""
    graph = estimated_graph(name, folder)
    base = replay(graph, store_all(graph))
    floor = solve(graph, "min", Rotor(), device=Device()).budget
    assert floor is not None
    lines = ""
    for share in shares:
        budget = floor + int(share * (base.peak_bytes - floor))
        plain = rotor_programs(graph, budget)[0]
        assert plain is not None
        plain_s = replay(graph, plain).time_s
        begin, cpu_begin = time.perf_counter(), time.process_time()
        solution = Monet().solve(graph, budget, time_limit_s=limit_s)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        assert solution.program is not None
        assert solution.time_s is not None
        assert solution.lower_bound_s is not None
        assert solution.gap is not None
        assert validate_and_replay(graph, solution.program, Budget(budget), None)[0] is None
        assert solution.time_s <= plain_s * (1 + 1e-9)
        cells = [
            name,
            str(len(graph.operators)),
            f"{share}",
            f"{budget / 2**30:.2f}",
            f"{plain_s / base.time_s - 1:+.1%}",
            f"{solution.time_s / base.time_s - 1:+.1%}",
            f"{solution.lower_bound_s / base.time_s - 1:+.1%}",
            f"{solution.gap:.1%}",
            f"{seconds:.0f}",
            f"{cpu_s:.0f}",
            str(solution.stats["chosen"]),
        ]
        line = "| " + " | ".join(cells) + " |\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        lines += line
    return lines


def main() -> None:
    """Print the table, line by line, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-graphs"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--shares", type=float, nargs="*", default=list(SHARES))
    parser.add_argument("--note", default="2 cores, one otherwise loaded.")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    page = (
        "# MONeT on whole models\n\n"
        f"Time overhead of plans found within {options.limit:g} s, batch {BATCH}, estimated for "
        f"{DEVICE}, exact implementations\n(`python -m benchmarks.monet_scale`). {options.note}\n"
        "Budgets are Rotor's smallest + share·(peak − Rotor's smallest); s is wall time. Overheads "
        "below zero: an\nimplementation chosen is faster than PyTorch's own operator in the "
        f"estimate.\n\n{HEAD}"
    )
    page += "|" + "---|" * 11 + "\n"
    for name in options.families:
        page += rows(name, options.folder, options.limit, options.shares)
        if options.out is not None:
            options.out.write_text(page)


if __name__ == "__main__":
    main()
