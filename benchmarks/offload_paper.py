"""Offloading §6 again: ratios to the best lower bound, as one page with its figures.

    python -m benchmarks.offload_paper [--out docs/results/offload_paper.md] [--only resnet ...]

Every network, image size and batch size is planned at budgets from its floor to M_peak, in estimate
mode. For every strategy three times are compared with max(Proposition 3, fractional optimum): the
paper's model with interruptible transfers, the same with whole transfers, and the program memopt
runs. Finished cases are kept in --resume, captured chains in --folder: run again to go on.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.kept import Kept
from benchmarks.offload_nets import FAMILIES, V100_PCIE
from benchmarks.offload_page import page, pictures
from benchmarks.offload_rows import Row
from benchmarks.rotor_chains import estimated_chain
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.strategies.base import Status, Strategy
from memopt.strategies.offload import AutoSwap, DynProg, Greedy, Tflms, Vdnn
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import OffloadProblem, offload_problem
from memopt.strategies.rotor.grouping import grouped

BATCHES = {224: (8, 32), 500: (8, 2), 1000: (8, 2)}
"""Powers of two; the paper names only 32 images of 224x224 (Figure 5)."""
MOST_TFLMS_STAGES = 128
"""The exhaustive search of TFLMS's two parameters takes L^4 steps."""
MOST_MOVABLE = 12
"""Up to so many activations all sets are tried, too."""
LINKS = (0.5, 2.0, 4.0)
"""Other bandwidths, in units of the paper's."""
COMMAND = "python -m benchmarks.offload_paper"


@dataclass(frozen=True)
class Case:
    """One chain, and a link that is `link` times as fast as the paper's.

    `own`: memopt's own stages instead of the paper's.
    """

    family: str
    depth: int
    image: int
    batch: int
    own: bool = False
    link: float = 1.0

    @property
    def device(self) -> Device:
        """The paper's, with the link of this case."""
        rate = V100_PCIE.to_host_bytes_per_s * self.link
        return replace(V100_PCIE, to_host_bytes_per_s=rate)

    @property
    def model(self) -> str:
        """The zoo's name."""
        return "inception_v3" if self.family == "inception" else f"{self.family}{self.depth}"

    def __str__(self) -> str:
        stages = ":own" if self.own else ""
        link = f":x{self.link:g}" if self.link != 1 else ""
        return f"{self.model}:{self.image}:b{self.batch}{stages}{link}"


@dataclass(frozen=True)
class Source:
    """Where chains come from: layer shapes, or memopt's estimate mode (kept in `folder`)."""

    folder: Path
    analytic: bool = False

    def chain(self, case: Case) -> Chain:
        """The chain of a case."""
        if self.analytic:
            return FAMILIES[case.family][0](case.depth, case.batch, case.image)
        chain = estimated_chain(case.model, case.image, self.folder, case.batch)
        return chain if case.own else paper_stages(chain)


def paper_stages(chain: Chain) -> Chain:
    """The chain with "each non-linear part in a virtual layer" (§6.1): a dense layer is one stage.

    memopt finds four stages in a dense layer x ↦ cat(x, f(x)): the state between them is x and
    what f has made so far. Other networks have the paper's stages already.
    """
    inside = re.compile(r"denseblock\d+\.denselayer")
    ends = [i for i, stage in enumerate(chain.stages, 1) if not inside.search(stage.name)]
    return grouped(chain, tuple(ends))


def cases(analytic: bool) -> Iterator[Case]:
    """All of §6.1 with one batch size and the other; with memopt's stages; with other links."""
    networks = [(family, depth) for family, (_, depths) in FAMILIES.items() for depth in depths]
    for number, (family, depth) in product(range(2), networks):
        for image, batches in BATCHES.items():
            yield Case(family, depth, image, batches[number])
    for family, depth in networks:
        if family == "densenet" and not analytic:
            for image, batches in BATCHES.items():
                yield Case(family, depth, image, batches[0], own=True)
    for family, depth in networks:
        for link in LINKS:
            yield Case(family, depth, 224, BATCHES[224][0], link=link)


def strategies(case: Case, stages: int) -> dict[str, Strategy]:
    """What is compared; the slow yardsticks where the paper has them."""
    found: dict[str, Strategy] = {
        "greedy": Greedy(),
        "paper's dynprog": DynProg(refine=False),
        "dynprog": DynProg(),
        "vdnn": Vdnn(),
    }
    if stages <= MOST_TFLMS_STAGES:
        found["tflms"] = Tflms()
    if not case.own and case.link == 1:
        found["autoswap"] = AutoSwap(trials=40)
    return found


def solve(case: Case, chain: Chain, share: float) -> Row:
    """Times of every strategy at one budget: floor + share·(M_peak - floor)."""
    problem = offload_problem(chain, None, case.device)
    floor, peak = problem.floor_bytes, problem.peak_bytes
    budget = chain.resident_bytes + floor + round(share * (peak - floor))
    row = Row(
        family=case.family,
        depth=case.depth,
        image=case.image,
        batch=case.batch,
        own=case.own,
        link=case.link,
        stages=len(chain),
        share=share,
        budget_bytes=budget,
        proposition_3_s=problem.compute_time_s,
        bound_s=problem.compute_time_s,
        times_s={},
        best_whole_s=best_whole_s(offload_problem(chain, budget, case.device)),
    )
    for name, strategy in strategies(case, len(chain)).items():
        solution = strategy.solve(chain, budget, device=case.device)
        if solution.status is Status.INFEASIBLE:
            continue
        assert solution.peak_bytes is not None
        assert solution.peak_bytes <= budget
        assert solution.time_s is not None
        stats = {key: value for key, value in solution.stats.items() if isinstance(value, float)}
        row.proposition_3_s = stats["proposition_3_s"]
        row.bound_s = max(stats["proposition_3_s"], stats["fractional_optimum_s"])
        row.times_s[name] = [
            stats["paper_time_s"],
            stats["paper_whole_time_s"],
            solution.time_s,
            stats["solve_s"],
        ]
    return row


def best_whole_s(problem: OffloadProblem) -> float | None:
    """The least ordered makespan with whole transfers of all sets; None if they are too many."""
    movable = np.flatnonzero(problem.movable)
    if len(movable) > MOST_MOVABLE:
        return None
    sets = product((False, True), repeat=len(movable))
    times = (makespan_s(problem, problem.amounts(movable[list(one)]), whole=True) for one in sets)
    return min(times)


@dataclass
class Options:
    """The command line."""

    out: Path
    folder: Path
    resume: Path
    analytic: bool
    fresh: bool
    points: int
    report: bool
    only: list[str] = field(default_factory=list)


def options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/offload_paper.md"))
    parser.add_argument("--folder", type=Path, default=Path("out/rotor-chains"))
    parser.add_argument("--resume", type=Path, default=Path("out/offload_paper.json"))
    parser.add_argument("--fresh", action="store_true", help="drop what --resume keeps")
    parser.add_argument("--analytic", action="store_true", help="chains from layer shapes")
    parser.add_argument("--points", type=int, default=11, help="budgets of each chain")
    parser.add_argument("--report", action="store_true", help="only what --resume keeps")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of case names")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Solve what is missing; write the page and its figures."""
    given = options()
    settings = {"points": given.points, "analytic": given.analytic, "device": V100_PCIE.name}
    kept = Kept(given.resume, Row, settings, fresh=given.fresh)
    wanted = {
        str(case): case
        for case in cases(given.analytic)
        if not given.only or str(case).startswith(tuple(given.only))
    }
    source = Source(given.folder, given.analytic)
    missing = [] if given.report else kept.missing(wanted, lambda _: None)
    for name in missing:
        started = time.perf_counter()
        chain = source.chain(wanted[name])
        shares = [index / (given.points - 1) for index in range(given.points)]
        kept.add(name, [solve(wanted[name], chain, share) for share in shares])
        done = f"{len(kept.rows.keys() & wanted.keys())}/{len(wanted)}"
        seconds = time.perf_counter() - started
        sys.stderr.write(f"{done} {name}: {len(chain)} stages, {seconds:.1f} s\n")
        sys.stderr.flush()
    command = " ".join([COMMAND, *(["--analytic"] if given.analytic else [])])
    rows = kept.ordered(wanted)
    if all(row.own or row.link != 1 for row in rows):
        sys.stdout.write("no case of the paper's own setting: no page\n")
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    images = pictures(rows, given.out)
    without = [name for name in wanted if name not in kept.rows]
    given.out.write_text(page(rows, command, images, without), encoding="utf-8")
    sys.stdout.write(f"{given.out}\n")


if __name__ == "__main__":
    main()
