"""A chain as a graph: every schedule needs as a program what the chain's own replay says."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import memopt
from memopt.models.budget import Budget
from memopt.models.chain import Chain, Stage
from memopt.models.device import Device
from memopt.models.generate import random_chain
from memopt.models.steps import FORWARD_MOVES, ChainStep, Move
from memopt.programs.liveness import store_all
from memopt.programs.replay import Timeline, replay
from memopt.programs.validate import validate
from memopt.programs.violations import ViolationCode
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.chain_to_graph import chain_to_graph
from tests.models.training_graphs import random_schedule, store_all_steps, with_random_transfers
from tests.strategies.offload.chains import three_stages
from tests.strategies.offload.replay_offload import replay_offload


def chain_of(seed: int) -> Chain:
    rng = Random(seed)
    return random_chain(
        rng,
        rng.randint(1, 7),
        parameter_gradients=rng.random() < 0.5,
        negative_overheads=rng.random() < 0.5,
        resident_bytes=rng.choice((0, 5)),
    )


def totals(timeline: Timeline) -> tuple[int, int, float, float]:
    return (
        timeline.peak_bytes,
        timeline.host_peak_bytes,
        timeline.time_s,
        timeline.total_stall_s,
    )


@pytest.mark.parametrize("seed", range(120))
def test_schedules_that_recompute(seed: int) -> None:
    """The papers' semantics: δ^n from the start; or the offloading one, where it comes with B^n."""
    chain = chain_of(seed)
    view = chain_to_graph(chain)
    for k in range(6):
        steps = random_schedule(chain, seed * 10 + k, detours=0.15 * k)
        own = replay_chain(chain, steps)
        program = view.lower(steps)
        assert validate(view.graph, program, Budget(own.peak_bytes, 0)) is None
        timeline = replay(view.graph, program)
        assert (timeline.peak_bytes, timeline.time_s) == (own.peak_bytes, own.time_s)
        late = view.lower(steps, own.peak_bytes - 1)
        assert validate(view.graph, late) is None
        assert totals(replay(view.graph, late)) == totals(replay_offload(chain, steps))


def left_on_host(steps: tuple[ChainStep, ...]) -> bool:
    """Whether something that was offloaded is not back before its last reader."""
    there: dict[int, bool] = {}
    """Stage → whether its next reader lets go of the host copy."""
    for step in steps:
        if step.move is Move.OFFLOAD:
            there[step.stage] = False
        elif step.move is Move.PREFETCH:
            there[step.stage] = True
        elif step.move in (*FORWARD_MOVES, Move.BACKWARD):
            read = {step.stage - 1} | ({step.stage} if step.move is Move.BACKWARD else set())
            there = {k: back for k, back in there.items() if k not in read or not back}
    return bool(there)


@pytest.mark.parametrize("seed", range(120))
def test_schedules_with_transfers(seed: int) -> None:
    rng = Random(seed)
    chain = chain_of(seed)
    view = chain_to_graph(chain)
    device = Device(
        to_host_bytes_per_s=rng.choice((1, 5, 40)),
        transfer_latency_s=rng.choice((0.0, 0.25)),
        duplex=rng.random() < 0.5,
    )
    moved = 0
    for k in range(4):
        steps = random_schedule(chain, seed * 10 + k, detours=0.1 * k)
        steps = with_random_transfers(chain, steps, seed * 10 + k)
        own = replay_offload(chain, steps, device)
        program = view.lower(steps)
        if not own.transfers:
            continue
        violation = validate(view.graph, program, Budget(own.peak_bytes, own.host_peak_bytes))
        if left_on_host(steps):
            # The chain's replay does not mind; its validator does, too.
            assert violation is not None
            assert violation.code is ViolationCode.LEFT_ON_HOST
            continue
        moved += 1
        assert violation is None
        assert totals(replay(view.graph, program, device)) == totals(own)
    assert moved or len(chain) < 4


@pytest.mark.parametrize("seed", range(40))
def test_the_frameworks_own_order_is_the_papers_baseline(seed: int) -> None:
    chain = chain_of(seed)
    graph = chain_to_graph(chain).graph
    own, papers = replay(graph, store_all(graph)), replay_chain(chain, store_all_steps(chain))
    assert (own.peak_bytes, own.time_s) == (papers.peak_bytes, papers.time_s)
    assert graph.resident_bytes == chain.resident_bytes
    assert graph.compute_time_s == pytest.approx(chain.compute_time_s)


def test_values_are_counted_on_their_own() -> None:
    """a^1 held beside ā^1, which contains it, counts twice, as in the paper."""
    chain = Chain(4, [Stage(1, 2, 3, 5, 3), Stage(1, 1, 2, 2, 2)])
    moves = (
        (Move.FORWARD_CHECKPOINT, 1),
        (Move.FORWARD_ALL, 1),
        (Move.FORWARD_ALL, 2),
        (Move.BACKWARD, 2),
        (Move.BACKWARD, 1),
    )
    view = chain_to_graph(chain)
    program = view.lower([ChainStep(*step) for step in moves])
    assert replay(view.graph, program).peak_bytes == 4 + 2 + 3 + 5 + 2 + 3


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("F1 F2 F3 B3 B2", ViolationCode.RESULT_MISSING),
        ("F1 F1 F2 F3 B3 B2 B1", ViolationCode.COMPUTED_WHILE_LIVE),
        ("F1 F2 F3 B3 B1 B2", ViolationCode.READ_ABSENT),
        ("O0 F1 R0 F2 F3 B3 B2 B1", ViolationCode.READ_ON_HOST),
        ("O0 F1 F2 F3 B3 P0 B2 B1", ViolationCode.SWAP_IN_WHILE_LIVE),
        ("O0 F1 F2 F3 B3 B2 B1", ViolationCode.LEFT_ON_HOST),
        ("O1 F1 R1 F2 F3 B3 P1 B2 B1", ViolationCode.SWAP_OUT_ABSENT),
        ("O0 O0 F1 R0 F2 F3 B3 P0 B2 B1", ViolationCode.SWAP_OUT_TWICE),
        ("F1 F2 P0 F3 B3 B2 B1", ViolationCode.SWAP_IN_ABSENT),
        ("c1 F2 f2 F3 B3 B2 B1", ViolationCode.READ_ABSENT),
        ("n1 F1 F2 F3 B3 B2 B1", ViolationCode.READ_ABSENT),
        ("F1 d1 F2 F3 B3 B2 B1", ViolationCode.FREED_ABSENT),
        ("F1 s1 F2 F3 B3 B2 B1", ViolationCode.READ_ABSENT),
    ],
)
def test_the_validator_of_programs_refuses_wrong_schedules(text: str, code: ViolationCode) -> None:
    moves = {
        "F": Move.FORWARD_ALL,
        "c": Move.FORWARD_CHECKPOINT,
        "n": Move.FORWARD_NO_SAVE,
        "f": Move.FORWARD_NO_SAVE,
        "B": Move.BACKWARD,
        "O": Move.OFFLOAD,
        "R": Move.RELEASE,
        "P": Move.PREFETCH,
        "d": Move.DROP_ACTIVATION,
        "s": Move.DROP_SAVED,
    }
    steps = [ChainStep(moves[word[0]], int(word[1:])) for word in text.split()]
    view = chain_to_graph(three_stages())
    violation = validate(view.graph, view.lower(steps))
    assert violation is not None
    assert violation.code is code


def test_overheads_that_no_operation_has_are_refused() -> None:
    stage = Stage(1, 1, 2, 3, 4, name="conv")
    with pytest.raises(ValueError, match="stage 1, 'conv': the overhead of a forward must be"):
        chain_to_graph(Chain(1, [replace(stage, forward_overhead_bytes=-1)]))
    chain_to_graph(Chain(1, [replace(stage, backward_overhead_bytes=-7)]))
    with pytest.raises(ValueError, match="backward_overhead_bytes must be at least -7"):
        chain_to_graph(Chain(1, [replace(stage, backward_overhead_bytes=-8)]))


@pytest.mark.parametrize("name", ["store-all", "rotor", "greedy", "auto"])
def test_a_plan_of_a_chain_has_a_graph_and_a_program(name: str) -> None:
    chain = chain_of(4)
    device = Device(to_host_bytes_per_s=5.0)
    for budget in ("min", None):
        plan = memopt.plan(chain, budget=budget, strategy=name, device=device, progress=False)
        assert validate(plan.graph, plan.program, Budget(plan.budget)) is None
        timeline = replay(plan.graph, plan.program, device)
        assert (timeline.peak_bytes, timeline.time_s) == (plan.peak_bytes, plan.step_time_s)
        assert plan.chain == chain
        assert plan.chain_steps is not None
        assert plan.arena is None


def test_plans_of_wrong_chains_are_refused_in_words() -> None:
    wrong = Chain(1, [Stage(1, 1, 2, 3, 4, 0, 0, -8)])
    with pytest.raises(ValueError, match="stage 1: backward_overhead_bytes"):
        memopt.plan(wrong, progress=False)
