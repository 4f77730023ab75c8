"""Offloading §6 again: ratios to the best lower bound, as one page with its figures.

Every network, image size and batch size is planned at budgets from its floor to M_peak, in estimate
mode; with `--throughput` the first batch size alone, for images per second. For every strategy
three times are compared with max(Proposition 3, fractional optimum): the paper's model with
interruptible transfers, the same with whole transfers, and the program memopt runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np

from benchmarks.graphs import chain_of
from benchmarks.offload_page import Row, blocks, pictures
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


@dataclass(frozen=True)
class Case:
    """One chain, by memopt's `own` stages or the paper's."""

    family: str
    depth: int
    image: int
    batch: int
    own: bool = False

    @property
    def model(self) -> str:
        """The zoo's name."""
        return "inception_v3" if self.family == "inception" else f"{self.family}{self.depth}"

    def __str__(self) -> str:
        stages = ":own" if self.own else ""
        return f"{self.model}:{self.image}:b{self.batch}{stages}"

    def chain(self) -> Chain:
        """Capture the chain, its stages merged as the paper's are."""
        chain = chain_of(self.model, self.image, self.batch)
        return chain if self.own else paper_stages(chain)


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
    for number, (family, depth) in product(range(2), networks):
        for image, batches in BATCHES.items():
            yield Case(family, depth, image, batches[number])
    for family, depth in networks:
        if family == "densenet":
            for image, batches in BATCHES.items():
                yield Case(family, depth, image, batches[0], own=True)


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
    chain, last = case.chain(), given.points - 1
    return [solve(case, chain, index / last) for index in range(given.points)]


def solve(case: Case, chain: Chain, share: float) -> Row:
    """Compare the times of all strategies at one budget: floor + share·(M_peak - floor)."""
    problem = offload_problem(chain, None, V100)
    floor, peak = problem.floor_bytes, problem.peak_bytes
    budget = chain.resident_bytes + floor + round(share * (peak - floor))
    row = Row(
        **vars(case),
        stages=len(chain),
        share=share,
        budget_bytes=budget,
        bound_s=problem.compute_time_s,
        times_s={},
        best_whole_s=best_whole_s(offload_problem(chain, budget, V100)),
    )
    for name, strategy in strategies(case, len(chain)).items():
        found = strategy.solve(chain, budget, device=V100)
        if found.status is Status.INFEASIBLE:
            continue
        assert found.peak_bytes is not None
        assert found.peak_bytes <= budget
        assert found.time_s is not None
        stats: dict[str, Any] = dict(found.stats)
        row.bound_s = max(stats["proposition_3_s"], stats["fractional_optimum_s"])
        row.times_s[name] = [stats["paper_time_s"], stats["paper_whole_time_s"], found.time_s]
    return row


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
