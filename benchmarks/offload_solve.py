"""How long DynProg takes on long chains (Offloading §5.3.2: 500 slots are "reasonable").

Chains of estimated networks, grouped to 150 and 339 stages, at ten budgets from the floor on. CPU
seconds of one thread, compiled beforehand; the largest of the ten budgets and their mean.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.graphs import chain_of, synthetic_chain
from benchmarks.offload_paper import linked
from benchmarks.runner import Benchmark, Line
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
WAYS = (DynProg(refine=False), DynProg())


def seconds(chain: Chain, strategy: DynProg) -> list[float]:
    """Measure CPU seconds at each budget."""
    problem = offload_problem(chain, None, linked())
    found = []
    for index in range(BUDGETS):
        size = problem.floor_bytes + round(
            index / BUDGETS * (problem.peak_bytes - problem.floor_bytes)
        )
        started = time.thread_time()
        strategy.solve(chain, chain.resident_bytes + size, device=linked())
        found.append(time.thread_time() - started)
    return found


def measured(_: Any, name: str, pixels: int, stages: int) -> list[Line]:
    """Solve one chain by both."""
    whole = chain_of(name, pixels)
    chain = grouped(whole, group_ends(whole, stages))
    found = [seconds(chain, one) for one in WAYS]
    cells = [f"{max(each):.2f} s, {statistics.mean(each):.2f} s" for each in found]
    return [Line(f"{name} | {pixels} | {len(chain)} | {AIMS_S[stages]:g} s | {' | '.join(cells)}")]


BENCHMARK = Benchmark(
    cases={f"{name}:{pixels}:{stages}": (name, pixels, stages) for name, pixels, stages in CASES},
    measure=measured,
    head="network | image | stages | aim | Algorithm 1: largest, mean | with local search",
    prepare=lambda _: [seconds(synthetic_chain(20), one) for one in WAYS],
)
