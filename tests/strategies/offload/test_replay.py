"""The chain replay with transfers: by hand, against the program replay, and its validator."""

from __future__ import annotations

import random

import numpy as np
import pytest

from memopt.errors import InvalidProgramError
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.steps import ChainStep, Move, has_transfers
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.programs.violations import ViolationCode
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.offload import Greedy
from memopt.strategies.offload.problem import offload_problem
from tests.strategies.offload.chains import three_stages
from tests.strategies.offload.oracle import random_chain
from tests.strategies.offload.replay_offload import replay_offload
from tests.strategies.offload.validate_offload import validate_offload


def schedule(text: str) -> list[ChainStep]:
    """ "F1 O0 R0 P0 B1" → steps."""
    moves = {
        "F": Move.FORWARD_ALL,
        "B": Move.BACKWARD,
        "O": Move.OFFLOAD,
        "R": Move.RELEASE,
        "P": Move.PREFETCH,
    }
    return [ChainStep(moves[word[0]], int(word[1:])) for word in text.split()]


GOOD = "O0 F1 R0 F2 F3 B3 P0 B2 B1"


def test_by_hand() -> None:
    """x_0 (4 bytes) at 2 B/s leaves during F^1 and one second more, and returns during B^2."""
    device = Device(to_host_bytes_per_s=2.0, from_host_bytes_per_s=1.0)
    timeline = replay_offload(three_stages(), schedule(GOOD), device)
    assert timeline.step_bytes == (4, 7, 7, 5, 5, 6, 9, 9, 7)
    assert timeline.live_bytes == (4, 7, 3, 5, 5, 5, 9, 7, 4)
    assert timeline.host_bytes == (4, 4, 4, 4, 4, 4, 4, 4, 0)
    assert timeline.peak_bytes == 9
    assert timeline.peak_instruction == 6
    assert timeline.start_s == (0, 0, 2, 2, 3, 4, 5, 5, 9)
    assert timeline.stall_s == (0, 0, 1, 0, 0, 0, 0, 0, 3)
    assert timeline.time_s == 10.0
    assert [(t.tensor, t.start_s, t.end_s) for t in timeline.transfers] == [(0, 0, 2), (0, 5, 9)]


def test_without_transfers_it_is_the_chain_replay() -> None:
    chain = Chain(3, list(three_stages().stages), resident_bytes=7)
    steps = schedule("F1 F2 F3 B3 B2 B1")
    assert not has_transfers(steps)
    ours, papers = replay_offload(chain, steps), replay_chain(chain, steps)
    assert ours.step_bytes == papers.step_bytes
    assert ours.time_s == papers.time_s


def as_graph(chain: Chain) -> Graph:
    """The chain as a graph: one operator for x_0, one per F^ℓ, one per B^ℓ."""
    n = len(chain)
    tensors = [Tensor("x0", chain.input_bytes)]
    tensors += [Tensor(f"x{i}", chain.stages[i - 1].saved_bytes) for i in range(1, n + 1)]
    tensors += [Tensor(f"d{i}", chain.gradient_bytes(i), TensorKind.GRADIENT) for i in range(n + 1)]
    tensors += [
        Tensor(f"g{i}", chain.stages[i - 1].parameter_gradient_bytes, TensorKind.GRADIENT)
        for i in range(1, n + 1)
    ]
    d, g = n + 1, 2 * n + 1
    operators = [Operator("input", (), (0,), 0.0)]
    for i, stage in enumerate(chain.stages, start=1):
        operators.append(
            Operator(f"F{i}", (i - 1,), (i,), stage.forward_time_s, stage.forward_overhead_bytes)
        )
    for i in range(n, 0, -1):
        stage = chain.stages[i - 1]
        operators.append(
            Operator(
                f"B{i}",
                (i - 1, i, d + i),
                (d + i - 1, g + i),
                stage.backward_time_s,
                stage.backward_overhead_bytes,
                Phase.BACKWARD,
            )
        )
    return Graph(
        tuple(tensors),
        tuple(operators),
        outputs=(),
        gradients=(d, *(g + i for i in range(1, n + 1))),
        tangents=(d + n,),
        tangents_held=False,
        extra_resident_bytes=chain.resident_bytes,
    )


def lowered(chain: Chain, steps: tuple[ChainStep, ...]) -> Program:
    """What the lowering of a real chain does with transfers."""
    n = len(chain)
    d, g = n + 1, 2 * n + 1
    out: list[Instruction] = [Compute(0, (0,))]
    moved: set[int] = set()
    for step in steps:
        i = step.stage
        if step.move is Move.OFFLOAD:
            out.append(SwapOut(i))
        elif step.move is Move.RELEASE:
            out.append(Free(i))
        elif step.move is Move.PREFETCH:
            out.append(SwapIn(i))
            moved.add(i)
        elif step.move is Move.FORWARD_ALL:
            out.append(Compute(i, (i,)))
        else:
            if i == n:
                out.append(LossBoundary())
            out.append(Compute(2 * n + 1 - i, (d + i - 1, g + i)))
            for j in (i, i - 1):
                if j in moved:
                    out.append(DropHost(j))
                    moved.remove(j)
            out += [Free(d + i), Free(i)]
    return Program([*out, Free(0)])


def test_equals_the_program_replay() -> None:
    rng = random.Random(31)
    for _ in range(150):
        chain = random_chain(rng, rng.randint(2, 7))
        device = Device(
            to_host_bytes_per_s=rng.choice([0.5, 1.0, 3.0]),
            from_host_bytes_per_s=rng.choice([0.5, 1.0, 3.0]),
            transfer_latency_s=rng.choice([0.0, 0.25]),
            duplex=rng.random() < 0.5,
        )
        problem = offload_problem(chain, None, device)
        budget = chain.resident_bytes + rng.randint(problem.floor_bytes, problem.peak_bytes)
        solution = Greedy().solve(chain, budget, device=device)
        assert solution.steps is not None
        graph, program = as_graph(chain), lowered(chain, solution.steps)
        assert validate(graph, program, Budget(budget)) is None
        ours, theirs = replay_offload(chain, solution.steps, device), replay(graph, program, device)
        assert ours.peak_bytes == theirs.peak_bytes
        assert ours.host_peak_bytes == theirs.host_peak_bytes
        assert ours.time_s == pytest.approx(theirs.time_s)
        assert ours.total_stall_s == pytest.approx(theirs.total_stall_s)
        assert [(t.tensor, t.direction) for t in ours.transfers] == [
            (t.tensor, t.direction) for t in theirs.transfers
        ]
        ends = [t.end_s for t in theirs.transfers]
        assert np.allclose([t.end_s for t in ours.transfers], ends)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (GOOD, None),
        ("O0 F1 R0 F2 F3 B3 B2 P0 B1", None),
        ("O0 F1 R0 F2 F3 B3 B2 B1", ViolationCode.READ_ON_HOST),
        ("O0 F1 F2 F3 B3 P0 B2 B1", ViolationCode.SWAP_IN_WHILE_LIVE),
        ("O0 F1 F2 F3 B3 B2 B1", ViolationCode.LEFT_ON_HOST),
        ("O1 F1 R1 F2 F3 B3 P1 B2 B1", ViolationCode.SWAP_OUT_ABSENT),
        ("O0 O0 F1 R0 F2 F3 B3 P0 B2 B1", ViolationCode.SWAP_OUT_TWICE),
        ("F1 R0 F2 F3 B3 P0 B2 B1", ViolationCode.FREED_ABSENT),
        ("F1 F2 P0 F3 B3 B2 B1", ViolationCode.SWAP_IN_ABSENT),
        ("F1 O1 F2 R1 F3 B3 P1 B2", ViolationCode.UNFINISHED),
        ("F1 F1 F2 F3 B3 B2 B1", ViolationCode.COMPUTED_WHILE_LIVE),
        ("F1 F2 F3 B3 B1 B2", ViolationCode.READ_ABSENT),
        ("F1 F2 F3 O7 B3 B2 B1", ViolationCode.UNKNOWN_STAGE),
        ("O0 R0 F1 F2 F3 B3 B2 B1", ViolationCode.READ_ON_HOST),
    ],
)
def test_validator_names_the_violation(text: str, code: ViolationCode | None) -> None:
    violation = validate_offload(three_stages(), schedule(text))
    assert (None if violation is None else violation.code) == code
    if code is None:
        replay_offload(three_stages(), schedule(text))
    elif code is not ViolationCode.LEFT_ON_HOST:
        with pytest.raises(InvalidProgramError):
            replay_offload(three_stages(), schedule(text))


def test_validator_checks_both_budgets() -> None:
    chain = three_stages()
    assert validate_offload(chain, schedule(GOOD), Budget(9, 4)) is None
    over = validate_offload(chain, schedule(GOOD), Budget(8))
    assert over is not None
    assert (over.code, over.instruction) == (ViolationCode.OVER_BUDGET, 6)
    host = validate_offload(chain, schedule(GOOD), Budget(9, 3))
    assert host is not None
    assert host.code is ViolationCode.OVER_HOST_BUDGET
