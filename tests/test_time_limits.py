"""Every strategy ends in its time: limit x 1.1 + 0.3 s, by a clock that counts work.

The clock counts the calls of this thread, a microsecond each, which is about what they take, so
that nothing depends on the machine or on what else it does, nor on which kernels are compiled
already: their compilation is not counted. Compiled kernels count as one call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from types import FrameType
from typing import Any

import pytest

from memopt.api.planning import solve
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.programs.solution import Solution
from memopt.strategies import STRATEGIES, Strategy, resolve
from memopt.strategies.named_budgets import Planning
from memopt.strategies.target import Target
from memopt.testing.solutions import store_all_peak

LINK = Device(to_host_bytes_per_s=2.0, from_host_bytes_per_s=2.0)
LIMIT_S, CALL_S, ROOM = 0.3, 1e-6, 0.6
MOST_STAGES = {"offload-exact": 60}


@dataclass
class WorkClock:
    """Seconds of work: calls of Python's and of compiled functions."""

    calls: int = 0
    compiling: int = 0

    def __call__(self) -> float:
        return self.calls * CALL_S

    def count(self, frame: FrameType, event: str, _argument: Any) -> None:
        if frame.f_code.co_name == "_compile_for_args" and event in ("call", "return"):
            self.compiling += 1 if event == "call" else -1
        elif not self.compiling:
            self.calls += event in ("call", "c_call")


@contextmanager
def work_clock() -> Iterator[WorkClock]:
    clock = WorkClock()
    before = sys.getprofile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        sys.setprofile(clock.count)
        try:
            yield clock
        finally:
            sys.setprofile(before)


@cache
def instance(kind: str, name: str = "") -> Graph | Chain:
    if kind == "graph":
        return random_graph(Random(5), 60)
    return random_chain(Random(5), MOST_STAGES.get(name, 120))


def solved(strategy: Strategy, target: Target, limit_s: float) -> tuple[Solution, float]:
    """The solution of a solve, and the work that it took."""
    budget = int(ROOM * store_all_peak(target.solved))
    with work_clock() as clock:

        def attempt(budget_bytes: int | None) -> Solution:
            left_s = max(0.0, limit_s - clock())
            return strategy.solve(target.solved, budget_bytes, device=LINK, time_limit_s=left_s)

        found = Planning(target, LINK, attempt, limit_s).within(budget)
        return found, clock()


def cases() -> list[tuple[str, str]]:
    return [
        (kind, one.name)
        for kind in ("graph", "chain")
        for one in STRATEGIES
        if kind == "graph" or one.needs != "graph"
    ]


@pytest.mark.parametrize(("kind", "name"), cases())
def test_ends_in_its_time(kind: str, name: str) -> None:
    strategy = resolve(name)
    target = Target.of(strategy, instance(kind, name))
    assert target.why_not() is None
    # The first solve of a process loads machine code.
    solved(strategy, target, LIMIT_S)
    found, took_s = solved(strategy, target, LIMIT_S)
    assert took_s <= 1.1 * LIMIT_S + 0.3
    assert found.plans or found.smallest_budget_bytes is not None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [("auto", 1000), ("rotor", 5000)])
def test_long_chains_are_planned_and_checked_in_their_time(name: str, stages: int) -> None:
    """Making their graph, lowering and checking included; and never worse than segments."""
    chain, plans = random_chain(Random(5), stages), []
    budget = int(ROOM * store_all_peak(chain))
    for strategy in (resolve(name), resolve("sequential")):
        with work_clock() as clock:
            plans.append(solve(chain, budget, strategy, device=LINK, time_limit_s=5.0))
            assert clock() <= 1.1 * 5.0 + 0.3
    assert plans[0].step_time_s <= plans[1].step_time_s
    assert plans[0].peak_bytes <= budget


def test_the_clock_counts_work() -> None:
    with work_clock() as clock:
        begin = time.monotonic()
        sorted(str(number) for number in range(10_000))
        assert time.monotonic() - begin > 10_000 * CALL_S
    assert time.monotonic() != clock()
