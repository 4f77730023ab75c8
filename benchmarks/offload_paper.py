"""Offloading §6 again: ratios to the best lower bound, as one page with its figures.

Every network, image size and batch size is planned at budgets from its floor to M_peak, in estimate
mode; with `--throughput` the first batch size alone, for images per second. For every strategy
three times are compared with max(Proposition 3, fractional optimum): the paper's model with
interruptible transfers, the same with whole transfers, and the program memopt runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import numpy as np

from benchmarks.graphs import chain_of
from benchmarks.offload_page import Case, Row, blocks, pictures
from benchmarks.runner import Benchmark
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.status import Status
from memopt.strategies.base import Strategy
from memopt.strategies.offload import AutoSwap, DynProg, Greedy, Tflms, Vdnn
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import OffloadProblem, offload_problem
from memopt.strategies.rotor.grouping import grouped

FAMILIES = {"resnet": (18, 34, 50, 101, 152), "densenet": (121, 161, 169, 201), "inception": (3,)}
BATCHES = {224: (8, 32), 500: (8, 2), 1000: (8, 2)}
"""Powers of two; the paper names only 32 images of 224x224 (Figure 5)."""
MOST_TFLMS_STAGES = 128
"""The exhaustive search of TFLMS's two parameters takes L^4 steps."""
V100 = Device(name="V100-PCIe", to_host_bytes_per_s=12.2e9, duplex=False)
"""The paper's (§6.1): one link of 12.2 GB/s for both directions."""
MOST_MOVABLE = 12
"""Up to so many activations all sets are tried, too."""


def paper_stages(chain: Chain) -> Chain:
    """Merge "each non-linear part in a virtual layer" (§6.1): a dense layer is one stage.

    memopt finds four stages in a dense layer x ↦ cat(x, f(x)): the state between them is x and
    what f has made so far. Other networks have the paper's stages already.
    """
    inside = re.compile(r"denseblock\d+\.denselayer")
    ends = [i for i, stage in enumerate(chain.stages, 1) if not inside.search(stage.name)]
    return grouped(chain, tuple(ends))


def cases() -> Iterator[Case]:
    """Give all of §6.1 with one batch size and the other and with memopt's stages."""
    networks = [(family, depth) for family, depths in FAMILIES.items() for depth in depths]
    for number, network, image in product(range(2), networks, BATCHES):
        yield Case(*network, image, BATCHES[image][number])
    for network, image in product(networks, BATCHES):
        if network[0] == "densenet":
            yield Case(*network, image, BATCHES[image][0], own=True)


def strategies(case: Case, stages: int) -> dict[str, Strategy]:
    """Choose what is compared; the slow yardsticks where the paper has them."""
    found: dict[str, Strategy] = {
        "greedy": Greedy(),
        "paper's dynprog": DynProg(refine=False),
        "dynprog": DynProg(),
        "vdnn": Vdnn(),
    }
    if stages <= MOST_TFLMS_STAGES:
        found["tflms"] = Tflms()
    if not case.own:
        found["autoswap"] = AutoSwap(trials=40)
    return found


def measured(given: Any, case: Case) -> list[Row]:
    """Plan a chain at equally spaced budgets."""
    chain, last = chain_of(case.model, case.image, case.batch), given.points - 1
    chain = chain if case.own else paper_stages(chain)
    return [solve(case, chain, index / last) for index in range(given.points)]


def solve(case: Case, chain: Chain, share: float) -> Row:
    """Compare the times of all strategies at one budget: floor + share·(M_peak - floor)."""
    problem = offload_problem(chain, None, V100)
    floor, peak = problem.floor_bytes, problem.peak_bytes
    budget = chain.resident_bytes + floor + round(share * (peak - floor))
    bound_s, times_s = problem.compute_time_s, {}
    for name, strategy in strategies(case, len(chain)).items():
        found = strategy.solve(chain, budget, device=V100)
        if found.status is Status.INFEASIBLE:
            continue
        assert found.peak_bytes <= budget
        stats: dict[str, Any] = dict(found.stats)
        bound_s = max(stats["proposition_3_s"], stats["fractional_optimum_s"])
        times_s[name] = [stats["paper_time_s"], stats["paper_whole_time_s"], found.time_s]
    best = best_whole_s(offload_problem(chain, budget, V100))
    figures = {"bound_s": bound_s, "times_s": times_s, "best_whole_s": best}
    return Row(**vars(case), stages=len(chain), share=share, budget_bytes=budget, **figures)


def best_whole_s(problem: OffloadProblem) -> float | None:
    """Find the least ordered makespan with whole transfers of all sets; None: they are too many."""
    movable = np.flatnonzero(problem.movable)
    if len(movable) > MOST_MOVABLE:
        return None
    sets = product((False, True), repeat=len(movable))
    times = (makespan_s(problem, problem.amounts(movable[list(one)]), whole=True) for one in sets)
    return min(times)


BENCHMARK = Benchmark(
    row=Row,
    cases=lambda given: {str(x): (x,) for x in islice(cases(), 30 if given.throughput else None)},
    measure=measured,
    blocks=blocks,
    options={"points": 11, "throughput": False},
    pictures=pictures,
)
