"""`memopt.plan(..., order=True, place=True)` over another strategy's plan."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from random import Random

import pytest
import torch

import memopt
from memopt.api.plan import Plan
from memopt.models.budget import NO_LIMIT, Budget
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Tensor, TensorKind
from memopt.models.instances import rotor_toy
from memopt.models.status import Status
from memopt.passes.order_and_place import MOST_SLOWER, order_and_place
from memopt.profiler import Profiled
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from tests.models.training_graphs import overwriting
from tests.plan.tiny import make, profiled, step_digest, tight_plan
from tests.random_programs import random_program

NAMES = ("mlp", "nested")


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[Profiled, Plan, Plan]]:
    """Profile, Rotor's plan, and the same with both passes."""
    found = {}
    for name in NAMES:
        one = profiled(make(name))
        tight = tight_plan(one)
        assert tight.budget is not None
        # Workspace lies outside the arena, so the arena needs more than the peak.
        budget = tight.budget * 2
        plain = memopt.plan(one, budget=budget, progress=False)
        both = memopt.plan(one, budget=budget, order=True, place=True, progress=False)
        found[name] = one, plain, both
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_rotor_plan_reordered_and_placed(
    name: str, cases: dict[str, tuple[Profiled, Plan, Plan]], tmp_path: Path
) -> None:
    _, plain, both = cases[name]
    assert both.graph is not None
    assert both.program is not None
    assert both.stats["placed"]
    assert both.program.offsets is not None
    assert validate(both.graph, both.program, Budget(both.budget)) is None
    assert both.peak_bytes == both.stats["placed_peak_bytes"]
    # At addresses a random operator is charged more, in both programs.
    before = replay(both.graph, plain.program).peak_bytes
    assert replay(both.graph, both.program).peak_bytes <= before
    assert both.step_time_s <= plain.step_time_s * (1 + 1e-9)
    timeline = replay(both.graph, both.program, both.device)
    assert (timeline.arena_bytes, timeline.placed_peak_bytes) == (
        both.stats["arena_bytes"],
        both.stats["placed_peak_bytes"],
    )
    text = both.summary()
    assert re.search(r"^arena .*bound .*fragmentation \d+\.\d\d%", text, re.MULTILINE), text
    assert re.search(r"^reordered .*gap to the bound \d+\.\d\d%", text, re.MULTILINE), text
    assert max(map(len, text.splitlines())) <= 80
    both.save(tmp_path / "plan")
    loaded = memopt.load(tmp_path / "plan")
    assert (loaded.program, loaded.summary()) == (both.program, text)


@pytest.mark.parametrize("name", NAMES)
def test_runs_bitwise_equal_to_eager(
    name: str, cases: dict[str, tuple[Profiled, Plan, Plan]]
) -> None:
    model, eager = make(name)[0], make(name)[0]
    planned = cases[name][2].apply(model)
    for _ in range(2):
        assert step_digest(name, planned) == step_digest(name, eager)
        for one in (model, eager):
            one.zero_grad(set_to_none=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            model.state_dict().values(),
            eager.state_dict().values(),
            strict=True,
        )
    )


def test_random_programs_stay_valid_and_within_their_budget() -> None:
    rng = Random(4)
    device = memopt.Device(to_host_bytes_per_s=2.0)
    whole = partly = left_out = short = 0
    for _ in range(60):
        graph = random_graph(rng, rng.randint(1, 6), implementations=True, updates=True)
        program = random_program(rng, graph, recomputations=2, swaps=2, reorder=True)
        own = replay(graph, program, device)
        made, stats = order_and_place(
            graph, program, Budget(own.peak_bytes), device, order=True, place=True
        )
        assert validate(graph, made, Budget(own.peak_bytes)) is None
        timeline = replay(graph, made, device)
        assert timeline.peak_bytes <= own.peak_bytes
        slower = stats["slower"]
        assert isinstance(slower, float)
        assert 0 <= slower <= MOST_SLOWER
        assert stats["shortened"] or not slower
        assert timeline.time_s <= own.time_s * (1 + slower + 1e-9)
        assert stats["placed"] == (made.offsets is not None)
        if made.offsets is None:
            left_out += 1
            continue
        assert stats["placed_peak_bytes"] == timeline.placed_peak_bytes
        whole += not made.unplaced
        partly += bool(made.unplaced)
        short += stats["shortened"] is True
    assert min(whole, partly, left_out, short) > 0


def test_without_a_budget_everything_has_an_address() -> None:
    rng = Random(4)
    for _ in range(20):
        graph = random_graph(rng, rng.randint(1, 6))
        made, stats = order_and_place(
            graph, store_all(graph), NO_LIMIT, memopt.Device(), order=False, place=True
        )
        assert made.offsets
        assert made.unplaced == ()
        assert stats["apart_bytes"] == 0


def test_each_pass_alone() -> None:
    graph = random_graph(Random(5), 6)
    plain = memopt.plan(graph, strategy="store-all", progress=False)
    ordered = memopt.plan(graph, strategy="store-all", order=True, progress=False)
    placed = memopt.plan(graph, strategy="store-all", place=True, progress=False)
    assert ordered.peak_bytes <= plain.peak_bytes
    assert ordered.program is not None
    assert ordered.program.offsets is None
    assert "arena" not in ordered.summary()
    assert placed.program is not None
    assert plain.program == store_all(graph)
    assert placed.program.instructions == store_all(graph).instructions
    assert placed.program.offsets
    assert "reordered" not in placed.summary()


@pytest.mark.parametrize("which", ["order", "place"])
def test_schedules_of_a_chain_are_refused(which: str) -> None:
    with pytest.raises(ValueError, match="of a Chain rotor plans schedules: take a strategy"):
        memopt.plan(rotor_toy(), strategy="rotor", **{which: True})
    plan = memopt.plan(rotor_toy(), strategy="monet", progress=False, **{which: True})
    assert plan.ran(which)


def test_a_plan_whose_lifetimes_were_shortened_says_so() -> None:
    said = slower = 0
    for seed in range(40):
        graph = random_graph(Random(seed), 9)
        device = memopt.Device(to_host_bytes_per_s=20.0)
        plan = memopt.plan(
            graph, strategy="offload-graph", place=True, budget="min", device=device, progress=False
        )
        if plan.stats["shortened"]:
            said += 1
            assert "freed earlier, fetched later" in plan.summary()
            assert max(map(len, plan.summary().splitlines())) <= 80
        else:
            assert "freed earlier" not in plan.summary()
        slower += _costs_what_it_says(plan, plan.stats["slower"])
    assert said > slower > 0


def _costs_what_it_says(plan: Plan, slower: object) -> bool:
    """Whether a placed plan waits for room, and its time, status and summary are what that makes
    them."""
    plain = memopt.plan(
        plan.graph, strategy="offload-graph", budget="min", device=plan.device, progress=False
    )
    assert isinstance(slower, float)
    assert slower <= MOST_SLOWER
    assert plan.step_time_s == pytest.approx(plain.step_time_s * (1 + slower), rel=1e-6)
    if not slower:
        assert plan.status is plain.status
        assert f"{slower:.2%} slower" not in plan.summary()
        return False
    assert plan.status is Status.FEASIBLE
    assert plan.gap > plain.gap
    assert f"{slower:.2%} slower" in plan.summary()
    return True


def test_a_link_without_a_speed_is_noted_and_nothing_is_shortened_by_it() -> None:
    moving = 0
    for seed in range(20):
        graph = random_graph(Random(seed), 9)
        for device in (memopt.Device(), memopt.Device(to_host_bytes_per_s=20.0)):
            plan = memopt.plan(
                graph,
                strategy="offload-graph",
                place=True,
                budget="min",
                device=device,
                progress=False,
            )
            assert plan.program is not None
            moves = any(isinstance(x, SwapOut) for x in plan.program)
            unknown = device.to_host_bytes_per_s == float("inf")
            assert any("has no speed" in note for note in plan.notes) == (moves and unknown)
            assert ("transfers count as" in plan.summary()) == (moves and unknown)
            assert not (unknown and plan.stats["shortened"])
            moving += moves and unknown
    assert moving


def test_an_output_that_gets_its_own_address_is_no_shortened_lifetime() -> None:
    """Placing may take an in-place output out of what it overwrites, which adds a free."""
    rng = Random(8)
    changed = 0
    for _ in range(60):
        graph = overwriting(rng, random_graph(rng, 6))
        graph = dataclasses.replace(graph, allocator_owned=tuple(graph.producer)[::2])
        program = with_in_place(graph, store_all(graph))
        made, stats = order_and_place(
            graph, program, NO_LIMIT, memopt.Device(), order=False, place=True
        )
        if stats["arena_gap"] == 0:
            changed += made.instructions != program.instructions
            assert stats["shortened"] is False
    assert changed


@pytest.mark.parametrize("passes", [{"order": True}, {"place": True}])
@pytest.mark.parametrize("strategy", ["store-all", "offload-graph"])
def test_passes_at_a_budget_that_needs_computing_in_place(
    strategy: str, passes: dict[str, bool]
) -> None:
    graph = Graph(
        tensors=[Tensor("x", 10, TensorKind.INPUT), *(Tensor(f"t{i}", 100) for i in range(3))],
        operators=[
            Operator("a", (0,), (1,), 1.0),
            Operator("b", (1,), (2,), 1.0, in_place=(1,)),
            Operator("c", (2,), (3,), 1.0, in_place=(2,)),
        ],
        outputs=(3,),
    )
    least = memopt.plan(graph, budget="min", strategy=strategy, progress=False)
    made = memopt.plan(graph, budget="min", strategy=strategy, progress=False, **passes)
    assert made.budget == least.budget == 110
    assert made.peak_bytes <= made.budget


@pytest.mark.parametrize("strategy", ["store-all", "rotor"])
def test_a_peak_that_only_the_order_reaches_is_planned_again(strategy: str) -> None:
    graph = random_graph(Random(25), 5)
    least = memopt.plan(graph, budget="min", strategy=strategy, order=True, progress=False)
    assert least.budget is not None
    assert least.peak_bytes < least.budget
    again = memopt.plan(
        graph, budget=least.peak_bytes, strategy=strategy, order=True, progress=False
    )
    assert again.peak_bytes <= least.peak_bytes
    with pytest.raises(memopt.InfeasibleBudgetError) as caught:
        memopt.plan(
            graph, budget=least.peak_bytes - 1, strategy=strategy, order=True, progress=False
        )
    assert caught.value.smallest_budget_bytes == least.peak_bytes
