"""What is wrong with addresses is found: by the checked arena, by the validator, in words."""

from __future__ import annotations

import re

import pytest
import torch

import memopt
from memopt.errors import ArenaError, InvalidProgramError
from memopt.executor.arena import arena_layout
from memopt.executor.arena_check import CheckedArenas, CheckedLease
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.validate import ViolationCode, validate
from tests.executor.arena_cases import (
    build,
    loss_of,
    step_plan,
    with_offsets,
)

CPU = torch.device("cpu")


def test_a_wrong_placement_is_found_at_the_first_spoilt_read() -> None:
    model, optimizer, plan = step_plan()
    _, x, y = build()
    everything_at_0 = with_offsets(plan, lambda *_: 0)
    assert plan.graph is not None
    assert everything_at_0.program is not None
    violation = validate(plan.graph, everything_at_0.program)
    assert violation is not None
    assert violation.code is ViolationCode.ADDRESSES_OVERLAP
    step = everything_at_0.train_step(model, loss_of, optimizer, checked=True)
    with pytest.raises(ArenaError, match=r"reads .* overwritten by"):
        step(x, targets=(y,))


def test_one_tensor_at_anothers_addresses_is_found() -> None:
    """Tensors moved one by one onto a neighbour that is live together with them."""
    model, optimizer, plan = step_plan()
    _, x, y = build()
    assert plan.program is not None
    assert plan.graph is not None
    assert plan.program.offsets is not None
    outcomes = []
    for index in range(3, len(plan.program.offsets), 13):
        at, tensor, _ = plan.program.offsets[index]
        other = plan.program.offsets[index - 1][2]
        wrong = with_offsets(
            plan, lambda i, t, o, a=at, b=tensor, c=other: c if (i, t) == (a, b) else o
        )
        assert wrong.program is not None
        if validate(plan.graph, wrong.program) is None:
            continue
        step = wrong.train_step(model, loss_of, optimizer, checked=True)
        try:
            step(x, targets=(y,))
        except memopt.MemoptError as error:
            outcomes.append("overwritten" in str(error))
    assert len(outcomes) >= 2
    assert all(outcomes)


def test_reads_of_freed_and_of_foreign_memory_are_found() -> None:
    plan = step_plan()[2]
    assert plan.profiled is not None
    assert plan.program is not None
    layout = arena_layout(plan.profiled.lowering, plan.program, CPU)
    assert layout is not None
    lease = CheckedArenas(layout).lease()
    assert isinstance(lease, CheckedLease)
    lease.slots[0].zero_()
    lease.wrote([0], "relu")
    lease.read([0], "mul")
    lease.memory[layout.slots[0].offset_bytes] = 7
    with pytest.raises(ArenaError, match=r"mul reads .* a kernel that wrote beyond its own"):
        lease.read([0], "mul")
    lease.freed([0])
    assert bool((lease.bytes_of(0) == 255).all())
    with pytest.raises(ArenaError, match=re.escape(f"mul reads {layout.name(0)}, whose")):
        lease.read([0], "mul")


def test_addresses_that_kernels_cannot_use_are_refused() -> None:
    model, optimizer, plan = step_plan()
    crooked = with_offsets(plan, lambda _i, _t, offset: offset + 4)
    with pytest.raises(InvalidProgramError, match="alignment=64"):
        crooked.train_step(model, loss_of, optimizer)


def test_what_lies_outside_is_named_and_charged() -> None:
    _, _, plan = step_plan()
    use = plan.arena
    assert use is not None
    assert plan.graph is not None
    assert plan.program is not None
    assert {kernel.target for kernel in use.outside} >= {
        "aten.convolution.default",
        "aten.convolution_backward.default",
    }
    assert 0.4 < use.coverage < 1
    timeline = replay(plan.graph, plan.program)
    assert use.arena_bytes == timeline.arena_bytes
    assert use.arena_bytes + use.extra_bytes == plan.peak_bytes
    assert plan.program.offsets is not None
    placed = {tensor for _, tensor, _ in plan.program.offsets}
    assert not placed & set(plan.graph.allocator_owned)
    first = plan.graph.allocator_owned[0]
    begin = next(i for i, x in enumerate(plan.program) if first in getattr(x, "outputs", ()))
    stray = Program(plan.program.instructions, [*plan.program.offsets, (begin, first, 0)])
    violation = validate(plan.graph, stray)
    assert violation is not None
    assert violation.code is ViolationCode.OFFSET_STRAY
    kept = next(x for x in plan.program.offsets if x[1] in plan.program.instructions[x[0]].outputs)  # type: ignore[union-attr]  # all are Compute
    fewer = Program(plan.program.instructions, [x for x in plan.program.offsets if x != kept])
    violation = validate(plan.graph, fewer)
    assert violation is not None
    assert violation.code is ViolationCode.OFFSET_MISSING


def test_a_plan_without_addresses_has_no_arena() -> None:
    model, x, _ = build()
    plan = memopt.plan(model, x, strategy="store-all", cache=False, progress=False)
    assert plan.arena is None
    assert "arena" not in plan.code
