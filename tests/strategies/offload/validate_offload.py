"""The independent checker of chain schedules with transfers (Offloading §3).

It shares no code with `offload_replay`: where each x_ℓ is (ā^ℓ, or a^0 for ℓ = 0) follows from its
own steps alone, and memory at a step is the sum over all stays that cover it, O(n²) on purpose.
Schedules that recompute are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memopt.models.budget import NO_LIMIT, Budget
from memopt.models.chain import Chain
from memopt.models.steps import ChainStep, Move
from memopt.programs.violations import Violation, ViolationCode, first

Code = ViolationCode


class Stay(NamedTuple):
    """Bytes on the device or the host, from step `begin` through step `end`."""

    size_bytes: int
    begin: int
    end: int


def validate_offload(
    chain: Chain,
    steps: Iterable[ChainStep],
    budget: Budget = NO_LIMIT,
) -> Violation | None:
    """Check a schedule of F_all, B and transfers; None means that it is valid.

    Args:
        chain: the chain, the loss last.
        steps: the schedule.
        budget: on the device and, for copies, on the host.
    """
    schedule = tuple(steps)
    found = _wrong_order(chain, schedule)
    if found is not None:
        return found
    device: list[Stay] = []
    host: list[Stay] = []
    violations: list[Violation] = []
    for stage in range(len(chain) + 1):
        violations += _history(chain, schedule, stage, device, host)
    if violations:
        return first(violations)
    device += _gradients(chain, schedule)
    for i, step in enumerate(schedule):
        used = chain.resident_bytes + _covering(device, i) + _overhead(chain, step)
        if budget.device_bytes is not None and used > budget.device_bytes:
            return Violation(Code.OVER_BUDGET, i, f"{step}: {used} bytes")
        stored = _covering(host, i)
        if budget.host_bytes is not None and stored > budget.host_bytes:
            return Violation(Code.OVER_HOST_BUDGET, i, f"{step}: {stored} bytes")
    return None


def _wrong_order(chain: Chain, schedule: Sequence[ChainStep]) -> Violation | None:
    """The computations must be F^1 ... F^n B^n ... B^1."""
    n = len(chain)
    wanted = [ChainStep(Move.FORWARD_ALL, stage) for stage in range(1, n + 1)]
    wanted += [ChainStep(Move.BACKWARD, stage) for stage in range(n, 0, -1)]
    for i, step in enumerate(schedule):
        transfer = step.move in (Move.OFFLOAD, Move.RELEASE, Move.PREFETCH)
        if not transfer and step.move not in (Move.FORWARD_ALL, Move.BACKWARD):
            return Violation(Code.UNKNOWN_INSTRUCTION, i, f"{step}")
        if not (0 if transfer else 1) <= step.stage <= n:
            return Violation(Code.UNKNOWN_STAGE, i, f"{step}: stages are 1 to {n}")
        if transfer:
            continue
        if not wanted or wanted[0] != step:
            again = step.move is Move.FORWARD_ALL and step not in wanted
            code = Code.COMPUTED_WHILE_LIVE if again else Code.READ_ABSENT
            return Violation(code, i, f"{step}: out of order")
        wanted.pop(0)
    return Violation(Code.UNFINISHED, len(schedule), f"{wanted[0]} is missing") if wanted else None


def _history(
    chain: Chain, schedule: Sequence[ChainStep], stage: int, device: list[Stay], host: list[Stay]
) -> list[Violation]:
    """Where x_stage is; its stays are appended to `device` and `host`."""
    size = chain.stages[stage - 1].saved_bytes if stage else chain.input_bytes
    on_device: int | None = None if stage else -1
    on_host: int | None = None
    returned = False
    found: list[Violation] = []
    for i, step in enumerate(schedule):
        what = _event(step, stage)
        if what is None:
            continue
        here, there = on_device is not None, on_host is not None
        code = _fault(what, here, there, returned)
        if code is not None:
            found.append(Violation(code, i, f"{step}: x_{stage}"))
            return found
        if what in ("make", "prefetch"):
            on_device, returned = i, what == "prefetch"
        elif what == "offload":
            on_host = i
        elif what in ("release", "free") and on_device is not None:
            device.append(Stay(size, on_device, i if what == "free" else i - 1))
            on_device = None
        if what in ("read", "free") and returned and on_host is not None:
            host.append(Stay(size, on_host, i - 1))
            on_host, returned = None, False
    end = len(schedule)
    if on_host is not None:
        found.append(Violation(Code.LEFT_ON_HOST, end, f"x_{stage}"))
    if on_device is not None:
        device.append(Stay(size, on_device, end))
    return found


def _event(step: ChainStep, stage: int) -> str | None:
    if step.move in (Move.OFFLOAD, Move.RELEASE, Move.PREFETCH):
        return step.move.value if step.stage == stage else None
    if step.stage == stage:
        return "make" if step.move is Move.FORWARD_ALL else "free"
    return "read" if step.stage == stage + 1 else None


def _fault(what: str, here: bool, there: bool, returned: bool) -> ViolationCode | None:
    """What is wrong with an event, given where x is."""
    if what in ("read", "free"):
        if not here:
            return Code.READ_ON_HOST if there else Code.READ_ABSENT
        return Code.LEFT_ON_HOST if what == "free" and there and not returned else None
    if what == "make":
        return Code.COMPUTED_WHILE_LIVE if here else None
    if what == "offload":
        if not here:
            return Code.SWAP_OUT_ABSENT
        return Code.SWAP_OUT_TWICE if there else None
    if what == "release":
        return None if here and there and not returned else Code.FREED_ABSENT
    if not there:
        return Code.SWAP_IN_ABSENT
    return Code.SWAP_IN_WHILE_LIVE if here else None


def _gradients(chain: Chain, schedule: Sequence[ChainStep]) -> list[Stay]:
    """δ^ℓ from B^{ℓ+1} (δ^n: from B^n) through B^ℓ; parameter gradients to the end."""
    at = {step.stage: i for i, step in enumerate(schedule) if step.move is Move.BACKWARD}
    end = len(schedule)
    stays = [Stay(chain.gradient_bytes(0), at[1], end)]
    for stage in range(1, len(chain) + 1):
        begin = at.get(stage + 1, at[stage])
        stays.append(Stay(chain.gradient_bytes(stage), begin, at[stage]))
        stays.append(Stay(chain.stages[stage - 1].parameter_gradient_bytes, at[stage], end))
    return stays


def _covering(stays: Sequence[Stay], i: int) -> int:
    return sum(stay.size_bytes for stay in stays if stay.begin <= i <= stay.end)


def _overhead(chain: Chain, step: ChainStep) -> int:
    stage = chain.stages[step.stage - 1]
    if step.move is Move.FORWARD_ALL:
        return stage.forward_overhead_bytes
    return stage.backward_overhead_bytes if step.move is Move.BACKWARD else 0
