"""Checkpointed blocks as a candidate: no plan of a step with collectives is slower than those."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import Any

import pytest

import memopt
from memopt.api.solving import solve
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.status import Status
from memopt.passes.early_collectives import with_early_collectives
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate
from memopt.reductions.block_checkpoints import (
    block_of,
    by_worth,
    checkpointed,
    forward_of_blocks,
    largest_sent_bytes,
)
from memopt.strategies import Rotor, StoreAll
from memopt.strategies.checkpointed_blocks import or_checkpointed
from memopt.strategies.target import chain_view

WEIGHT, INNER, OUTER = 80, 60, 10
GATHER = Collective(CollectiveKind.ALL_GATHER, 8, WEIGHT)
SCATTER = Collective(CollectiveKind.REDUCE_SCATTER, 8, WEIGHT)


def blocks_in_a_row(count: int) -> Graph:
    """Blocks of a gathered weight, a large activation within and a small one between; their
    network time hides behind what they compute."""
    tensors = [Tensor("x0", OUTER, TensorKind.INPUT)]
    operators: list[Operator] = []

    def new(name: str, size: int, kind: TensorKind = TensorKind.ACTIVATION) -> int:
        tensors.append(Tensor(name, size, kind))
        return len(tensors) - 1

    x, saved = 0, []
    for k in range(count):
        path = f"layers.{k}.linear"
        shard = new(f"shard{k}", WEIGHT // 8, TensorKind.PARAMETER)
        w, a = new(f"w{k}", WEIGHT), new(f"a{k}", INNER)
        y = new(f"x{k + 1}", OUTER, TensorKind.ACTIVATION if k < count - 1 else TensorKind.OUTPUT)
        operators += [
            Operator(f"gather{k}", (shard,), (w,), 1.0, module=path, collective=GATHER),
            Operator(f"first{k}", (x, w), (a,), 3.0, module=path),
            Operator(f"second{k}", (a,), (y,), 3.0, module=path),
        ]
        saved.append((x, w, a))
        x = y
    dy = tangent = new("dy", OUTER, TensorKind.GRADIENT)
    gradients, back = [], Phase.BACKWARD
    for k in reversed(range(count)):
        path = f"layers.{k}.linear"
        dw, dx = (new(f"{name}{k}", size, TensorKind.GRADIENT) for name, size in SIZES)
        g = new(f"g{k}", WEIGHT // 8, TensorKind.GRADIENT)
        operators += [
            Operator(f"backward{k}", (dy, *saved[k]), (dw, dx), 12.0, 0, back, module=path),
            Operator(f"scatter{k}", (dw,), (g,), 1.0, 0, back, module=path, collective=SCATTER),
        ]
        gradients.append(g)
        dy = dx
    return Graph(tensors, operators, (x,), tuple(gradients), (tangent,))


SIZES = (("dw", WEIGHT), ("dx", OUTER))
COUNT = 20
GRAPH = blocks_in_a_row(COUNT)
BLOCKS = forward_of_blocks(GRAPH)
STORED = store_all(GRAPH)


def test_blocks_are_the_modules_of_lists() -> None:
    paths = ["", "words", "layers.3", "layers.3.q", "transformer.h.0.mlp.1", "0"]
    assert [*map(block_of, paths)] == ["", "", "layers.3", "layers.3", "transformer.h.0", "0"]
    assert list(BLOCKS) == [f"layers.{k}" for k in range(COUNT)]
    assert BLOCKS["layers.1"] == [3, 4, 5]
    assert largest_sent_bytes(GRAPH) == 2 * WEIGHT


@pytest.mark.parametrize("kept", [0, 1, COUNT - 1, COUNT])
def test_what_runs_again(kept: int) -> None:
    last = list(BLOCKS.values())[COUNT - kept :]
    program = checkpointed(GRAPH, BLOCKS, {op for members in last for op in members})
    assert validate(GRAPH, program) is None
    runs = Counter(run.op for _, run in program.computes)
    twice = {GRAPH.operators[op].name for op, count in runs.items() if count == 2}
    again = COUNT - kept
    # The last product's result is no one's in the backward; the last block's weight stays.
    weights = again if kept else COUNT - 1
    gathers = {f"gather{k}" for k in range(weights)}
    assert twice == gathers | {f"first{k}" for k in range(again)}
    if kept == COUNT:
        assert program == store_all(GRAPH)


class Planless(Rotor):
    """Finds nothing, as Rotor does where a model is no chain."""

    def solve(self, *_: Any, **__: Any) -> Solution:
        return Solution(Status.INFEASIBLE)


def test_blocks_fit_where_a_strategy_finds_no_plan() -> None:
    budget = replay(GRAPH, checkpointed(GRAPH, BLOCKS)).peak_bytes
    plan = memopt.plan(GRAPH, budget=budget, strategy=Planless(), progress=False)
    assert plan.peak_bytes <= budget
    assert (plan.status, plan.stats["schedule"]) == (Status.FEASIBLE, "checkpointed blocks")
    with pytest.raises(memopt.InfeasibleBudgetError):
        memopt.plan(GRAPH, budget=budget // 2, strategy=Planless(), progress=False)


def prefetched(program: Program) -> Program:
    peak = replay(GRAPH, program).peak_bytes
    return with_early_collectives(GRAPH, program, peak + largest_sent_bytes(GRAPH))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_no_plan_is_slower(share: float) -> None:
    published = replay(GRAPH, prefetched(checkpointed(GRAPH, BLOCKS)))
    most = replay(GRAPH, store_all(GRAPH)).peak_bytes
    budget = int(published.peak_bytes + share * (most - published.peak_bytes))
    # Few slots, as those of a deep model are beside its small checkpoints.
    strategy = Rotor(slots=10, exact_stages=0)
    plan = memopt.plan(GRAPH, budget=budget, strategy=strategy, progress=False)
    assert plan.peak_bytes <= budget
    # By itself, Rotor needs 463 at a share of 0.05.
    assert plan.step_time_s <= published.time_s == 460
    if share:
        assert plan.stats["schedule"] == "checkpointed blocks"
        assert plan.chain_steps is None
    if share == 0.3:
        # As many blocks as fit keep what they have.
        assert plan.step_time_s < 440


def test_what_is_worth_most_is_kept_first() -> None:
    names = [[GRAPH.operators[op].name for op in ops] for ops in by_worth(GRAPH, BLOCKS, False)]
    second, first = [["second19"], ["second18"]], [["first19"], ["first18"]]
    assert (names[:2], names[COUNT : COUNT + 2], len(names)) == (second, first, 2 * COUNT)
    (gather,) = by_worth(GRAPH, BLOCKS, True)[2 * COUNT]
    assert GRAPH.operators[gather].name == "gather19"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_activations_are_kept_instead_of_weights_that_cost_nothing(share: float) -> None:
    least, most = (
        replay(GRAPH, program).peak_bytes
        for program in (prefetched(checkpointed(GRAPH, BLOCKS)), store_all(GRAPH))
    )
    budget = int(least + share * (most - least))
    whole = [
        replay(GRAPH, with_early_collectives(GRAPH, program, budget))
        for last in range(COUNT + 1)
        for members in [list(BLOCKS.values())[COUNT - last :]]
        for program in [checkpointed(GRAPH, BLOCKS, {op for ops in members for op in ops})]
        if replay(GRAPH, program).peak_bytes <= budget
    ]
    strategy = Rotor(slots=10, exact_stages=0)
    plan = memopt.plan(GRAPH, budget=budget, strategy=strategy, progress=False)
    assert plan.peak_bytes <= budget
    assert plan.step_time_s < min(timeline.time_s for timeline in whole)


def test_a_faster_plan_stays() -> None:
    most = replay(GRAPH, store_all(GRAPH)).peak_bytes
    plan = memopt.plan(GRAPH, budget=most, strategy="rotor", progress=False)
    assert "schedule" not in plan.stats
    least = replay(GRAPH, checkpointed(GRAPH, BLOCKS)).peak_bytes
    with pytest.raises(memopt.InfeasibleBudgetError):
        memopt.plan(GRAPH, budget=least, strategy=StoreAll(), progress=False)


def test_steps_of_a_view_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Program] = []

    def counted(*given: Any) -> Program:
        made.append(checkpointed(*given))
        return made[-1]

    monkeypatch.setattr(sys.modules[or_checkpointed.__module__], "checkpointed", counted)
    least, most = (replay(GRAPH, x).peak_bytes for x in (checkpointed(GRAPH, BLOCKS), STORED))
    budget, strategy = (least + most) // 2, Rotor(slots=10, exact_stages=0)
    view = chain_view(dataclasses.replace(GRAPH))
    programs, counts = [], []
    for asked in (budget, budget, budget - 1):
        made.clear()
        plan = solve(view.graph, asked, strategy, device=memopt.Device(), view=view)
        programs.append(plan.program)
        counts.append(len(made))
    assert programs[0] == programs[1]
    assert counts[0] > counts[2] >= counts[1] == 0
