"""How long DynProg takes on long chains (Offloading §5.3.2: 500 slots are "reasonable").

    python -m benchmarks.offload_solve [--folder FOLDER] [--out FILE]

Chains of estimated networks, grouped to 150 and 339 stages, at ten budgets from the floor on. CPU
seconds of one thread, compiled beforehand; the largest of the ten budgets and their mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from benchmarks.offload_nets import V100_PCIE
from benchmarks.rotor_chains import estimated_chain
from memopt.models.chain import Chain
from memopt.strategies.offload import DynProg
from memopt.strategies.offload.problem import offload_problem
from memopt.strategies.rotor.grouping import group_ends, grouped

CASES = (
    ("densenet121", 224, 150),
    ("densenet201", 224, 150),
    ("densenet201", 1000, 150),
    ("densenet201", 224, 339),
    ("densenet201", 1000, 339),
    ("resnet1001", 224, 339),
)
AIMS_S = {150: 1.0, 339: 5.0}
BUDGETS = 10


def seconds(chain: Chain, strategy: DynProg) -> list[float]:
    """CPU seconds at each budget."""
    problem = offload_problem(chain, None, V100_PCIE)
    found = []
    for index in range(BUDGETS):
        share = index / BUDGETS
        size = problem.floor_bytes + round(share * (problem.peak_bytes - problem.floor_bytes))
        started = time.thread_time()
        strategy.solve(chain, chain.resident_bytes + size, device=V100_PCIE)
        found.append(time.thread_time() - started)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/rotor-chains"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| network | image | stages | aim | Algorithm 1: largest, mean | with local search |",
        "|---|---|---|---|---|---|",
    ]
    compiled = False
    for name, pixels, stages in CASES:
        whole = estimated_chain(name, pixels, options.folder)
        chain = grouped(whole, group_ends(whole, stages))
        cells = []
        for strategy in (DynProg(refine=False), DynProg()):
            if not compiled:
                seconds(chain, strategy)
            found = seconds(chain, strategy)
            cells.append(f"{max(found):.2f} s, {statistics.mean(found):.2f} s")
        compiled = True
        aim = f"{AIMS_S[stages]:g} s"
        lines.append(f"| {name} | {pixels} | {len(chain)} | {aim} | {' | '.join(cells)} |")
        sys.stderr.write(lines[-1] + "\n")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
