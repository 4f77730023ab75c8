"""The independent checker of chain schedules (Rotor §3, Table 1), parameter gradients included.

It shares no code with `chain_replay`: each value's own history gives its lifetimes, and memory
at a step is the sum over all lifetimes that cover it. That is O(n²) on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memopt.models.chain import Chain
from memopt.models.steps import ChainStep, Move
from memopt.programs.violations import Violation, ViolationCode, first

Code = ViolationCode

FORWARD = (Move.FORWARD_NO_SAVE, Move.FORWARD_CHECKPOINT, Move.FORWARD_ALL)


class Value(NamedTuple):
    """A value of the chain: "a", "saved" (ā), "gradient" (δ) or "parameter" (g), of a stage."""

    kind: str
    stage: int


class Event(NamedTuple):
    """What a step does to a value: "read", "own" (read, and not as a part of ā), "produce",
    "free", or "free if held"."""

    step: int
    what: str


class Stay(NamedTuple):
    """A value in memory, from the step that produces it through the step that frees it."""

    value: Value
    begin: int
    end: int


def validate_chain(
    chain: Chain, steps: Iterable[ChainStep], budget_bytes: int | None = None
) -> Violation | None:
    """Check a schedule without transfers; None means that it is valid.

    Args:
        chain: the chain, the loss last.
        steps: the schedule, Rotor Definition 3.1.
        budget_bytes: memory, resident included; None: no limit.

    Returns:
        The first violation: of the data dependencies if there is one, else of the budget.
    """
    schedule = tuple(steps)
    for i, step in enumerate(schedule):
        if step.move in (Move.OFFLOAD, Move.RELEASE, Move.PREFETCH):
            return Violation(Code.UNKNOWN_INSTRUCTION, i, f"{step}: a transfer")
        if not 1 <= step.stage <= len(chain):
            return Violation(Code.UNKNOWN_STAGE, i, f"{step}: stages are 1 to {len(chain)}")
    stays, found = _stays(chain, schedule)
    if found:
        return first(found)
    for i, used in enumerate(_memory(chain, schedule, stays)):
        if budget_bytes is not None and used > budget_bytes:
            message = f"{schedule[i]}: {used} bytes, {used - budget_bytes} too many"
            return Violation(Code.OVER_BUDGET, i, message)
    return None


def chain_memory_use(chain: Chain, steps: Iterable[ChainStep]) -> list[int]:
    """Memory during each step of a valid schedule, bytes, by summing over lifetimes."""
    schedule = tuple(steps)
    return _memory(chain, schedule, _stays(chain, schedule)[0])


def _events(chain: Chain, i: int, step: ChainStep) -> list[tuple[Value, Event]]:
    """What a step does, straight from Table 1."""
    stage, move = step.stage, step.move
    activation, before = Value("a", stage), Value("a", stage - 1)
    saved = Value("saved", stage)
    if move is Move.DROP_ACTIVATION:
        return [(activation, Event(i, "free"))]
    if move is Move.DROP_SAVED:
        return [(saved, Event(i, "free"))]
    if move is Move.FORWARD_ALL:
        return [(before, Event(i, "read")), (saved, Event(i, "produce"))]
    if move is Move.FORWARD_CHECKPOINT:
        return [(before, Event(i, "read")), (activation, Event(i, "produce"))]
    if move is Move.FORWARD_NO_SAVE:
        return [
            (before, Event(i, "own")),
            (activation, Event(i, "produce")),
            (before, Event(i, "free")),
        ]
    events = [
        (Value("gradient", stage), Event(i, "own")),
        (saved, Event(i, "own")),
        (before, Event(i, "read")),
        (Value("gradient", stage - 1), Event(i, "produce")),
        (Value("parameter", stage), Event(i, "produce")),
        (Value("gradient", stage), Event(i, "free")),
        (saved, Event(i, "free")),
    ]
    return [*events, (before, Event(i, "free if held"))] if stage > 1 else events


def _stays(chain: Chain, schedule: Sequence[ChainStep]) -> tuple[list[Stay], list[Violation]]:
    """Every value's stays in memory, and the violations of the data dependencies."""
    loss = len(chain)
    start, end = -1, len(schedule)
    histories: dict[Value, list[Event]] = {
        Value("a", 0): [Event(start, "produce")],
        Value("gradient", loss): [Event(start, "produce")],
    }
    for i, step in enumerate(schedule):
        for value, event in _events(chain, i, step):
            histories.setdefault(value, []).append(event)
    stays: list[Stay] = []
    found: list[Violation] = []
    wanted: list[tuple[Value, int]] = []
    for value, history in histories.items():
        since: int | None = None
        for i, what in history:
            if what == "produce":
                if since is None:
                    since = i
                else:
                    found.append(Violation(Code.COMPUTED_WHILE_LIVE, i, f"{value}"))
            elif what in ("read", "own"):
                if since is None:
                    if what == "read":
                        wanted.append((value, i))
                    else:
                        found.append(Violation(Code.READ_ABSENT, i, f"{value}"))
            elif since is not None:
                if value == Value("a", 0):
                    found.append(Violation(Code.RESULT_FREED, i, "a^0 is the step's input"))
                stays.append(Stay(value, since, i))
                since = None
            elif what == "free":
                found.append(Violation(Code.FREED_ABSENT, i, f"{value}"))
        if since is not None:
            stays.append(Stay(value, since, end))
    for value, i in wanted:
        # ā contains a: a reader takes the one that is there.
        if not any(x.value == Value("saved", value.stage) and x.begin < i <= x.end for x in stays):
            found.append(Violation(Code.READ_ABSENT, i, f"{value}"))
    if not any(x.value == Value("gradient", 0) for x in stays):
        found.append(Violation(Code.UNFINISHED, end, "there is no B^1"))
    return stays, found


def _memory(chain: Chain, schedule: Sequence[ChainStep], stays: Sequence[Stay]) -> list[int]:
    """Memory during each step: resident, every stay that covers it, and its overhead."""
    begin = np.array([x.begin for x in stays], dtype=np.int64)
    end = np.array([x.end for x in stays], dtype=np.int64)
    size = np.array([_size(chain, x.value) for x in stays], dtype=np.int64)
    memory = []
    for i, step in enumerate(schedule):
        covering = int(size[(begin <= i) & (i <= end)].sum())
        if step.move in (Move.DROP_ACTIVATION, Move.DROP_SAVED):
            covering = int(size[(begin <= i) & (i < end)].sum())
        memory.append(chain.resident_bytes + covering + _overhead(chain, step))
    return memory


def _size(chain: Chain, value: Value) -> int:
    if value == Value("a", 0):
        return chain.input_bytes
    if value == Value("gradient", 0):
        return chain.input_gradient_bytes
    stage = chain.stages[value.stage - 1]
    return {
        "a": stage.output_bytes,
        "saved": stage.saved_bytes,
        "gradient": stage.gradient_bytes,
        "parameter": stage.parameter_gradient_bytes,
    }[value.kind]


def _overhead(chain: Chain, step: ChainStep) -> int:
    stage = chain.stages[step.stage - 1]
    if step.move is Move.BACKWARD:
        return stage.backward_overhead_bytes
    if step.move is Move.FORWARD_ALL:
        return stage.forward_overhead_bytes
    if step.move in FORWARD:
        without = stage.forward_no_save_overhead_bytes
        return stage.forward_overhead_bytes if without is None else without
    return 0
