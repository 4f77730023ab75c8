"""Faults in a whole planned step, whose updates lie in the midst of its backward."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from memopt.executor import undo as undo_module
from memopt.pricing.memory import metered
from memopt.step.step_optimizer import HostState
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import (
    AtAllocation,
    AtLine,
    AtOperator,
    Injected,
    error_of,
    failing,
    patch_step,
)
from tests.faults.states import CPU
from tests.faults.subjects import Whole, accumulating, whole
from tests.whole_steps.test_failing_steps import said

_BEFORE = "with `undo=True` all as before"

KINDS: dict[str, Callable[[], Whole]] = {
    "": lambda: whole(undo=True),
    ", its optimizer's state on the host": lambda: whole(undo=True, offloaded=True),
    ", which computes again": lambda: whole(undo=True, strategy="rotor"),
    ", of micro-batches, clipped, from the host": accumulating,
}
_SLOW = (", which computes again", ", of micro-batches, clipped, from the host")


def everywhere(room: Room, make: Callable[[], Whole], injection: Callable[..., Any]) -> int:
    """Let steps fail at the places of an injection; what failed has not happened."""
    one = make()
    count = injection()
    assert one.fails(count) is None
    happened = 0
    for number in room.places(count.seen, 6):
        point = injection(number)
        error = one.fails(point, whole=True)
        if error is None:
            assert point.seen < number
            continue
        assert isinstance(error, (Injected, torch.OutOfMemoryError, KeyboardInterrupt)), error
        happened += 1
        if happened % 10 == 0:
            one.check_next()
    one.check_next()
    return happened


EVERYWHERE: dict[str, tuple[Callable[..., Any], str]] = {
    "an operator fails": (AtOperator, "its own error"),
    "the memory runs out at an allocation": (AtAllocation, "torch's error"),
    "Ctrl-C at an operator": (partial(AtOperator, error=KeyboardInterrupt), "KeyboardInterrupt"),
    "Ctrl-C at a line": (AtLine, "KeyboardInterrupt; all as after it, if an update had begun, or"),
}
for _kind, _make in KINDS.items():
    for _what, (_injection, _said) in EVERYWHERE.items():
        fault(
            Part.WHOLE,
            f"{_what}, in a whole step{_kind}",
            f"{_said}{' ' if _said.endswith('or') else '; '}{_BEFORE}",
            slow=_kind in _SLOW,
        )(partial(everywhere, make=_make, injection=_injection))


@fault(
    Part.WHOLE,
    "an operator fails, in a whole step without `undo`",
    "all as before, or an error that says how many parameters have been updated",
)
def without_undo(room: Room) -> int:
    one = whole(undo=False)
    one.check_next()  # another plan's step before has let this one's arena go
    begin, happened = one.now(), 0
    # Not within `fails`, whose meter has the optimizer run some operators more.
    one.run_with(count := AtOperator())
    begin.into(one.model, one.optimizer)
    for number in room.places(count.seen, 6):
        error = error_of(partial(one.run_with, AtOperator(number)))
        assert error is not None, number
        updated, half = said(error)
        happened += 1
        found = one.now()
        changed = [
            k for k, v in begin.trained[0].items() if not torch.equal(v, found.trained[0][k])
        ]
        assert len([name for name in changed if name != half]) == updated
        if not updated and not half:
            one.check_same(found, begin)
        begin.into(one.model, one.optimizer)
        one.check_next()
        begin.into(one.model, one.optimizer)
    return happened


def patched(
    room: Room,
    patch: Callable[[Whole, pytest.MonkeyPatch], None],
    error: type[BaseException],
    make: Callable[[], Whole] = KINDS[""],
) -> int:
    """One fault by a patch; nothing has happened."""
    one = make()
    with room.patch.context() as undone:
        patch(one, undone)
        found = one.fails(whole=True)
    assert isinstance(found, error), found
    assert "taken back" in "".join(found.__notes__)
    one.check_next()
    return 1


@fault(Part.WHOLE, "an optimizer fails at once", f"its own error; {_BEFORE}")
def optimizer_at_once(room: Room) -> int:
    def patch(one: Whole, undone: pytest.MonkeyPatch) -> None:
        patch_step(undone, one.optimizer, lambda real: failing(real, 1, Injected("at once")))

    return patched(room, patch, Injected)


@fault(Part.WHOLE, "an optimizer fails when its update is done", f"its own error; {_BEFORE}")
def optimizer_too_late(room: Room) -> int:
    def patch(one: Whole, undone: pytest.MonkeyPatch) -> None:
        def made(real: Callable[[], Any]) -> Callable[[], Any]:
            def late() -> None:
                real()
                raise Injected("too late")

            return late

        patch_step(undone, one.optimizer, made)

    return patched(room, patch, Injected)


@fault(Part.WHOLE, "updated state cannot be written to the host", f"MemoryError; {_BEFORE}")
def put_away(room: Room) -> int:
    def patch(_one: Whole, undone: pytest.MonkeyPatch) -> None:
        real, calls = HostState.put_away, 0

        def broken(self: HostState, parameter: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            # Those before are of the begin of the step.
            if calls == 13:
                raise MemoryError("injected: no host memory")
            real(self, parameter)

        undone.setattr(HostState, "put_away", broken)

    return patched(room, patch, MemoryError, KINDS[", its optimizer's state on the host"])


@fault(Part.WHOLE, "no host memory for the copies of `undo`", f"MemoryError; {_BEFORE}")
def no_copies(room: Room) -> int:
    happened = 0
    for number in room.places(10):

        def patch(one: Whole, undone: pytest.MonkeyPatch, number: int = number) -> None:
            undo = one.train._undo
            assert undo is not None
            undo._memory.clear()
            broken = failing(undo_module.host_like, number, MemoryError("injected"))
            undone.setattr(undo_module, "host_like", broken)

        happened += patched(room, patch, MemoryError)
    return happened


@fault(
    Part.WHOLE,
    "the first step of all fails, before there is optimizer state",
    f"its own error; {_BEFORE}, without state",
    slow=True,
)
def first_step(room: Room) -> int:
    happened = 0
    for offloaded in (False, True):
        one = Whole(undo=True, offloaded=offloaded)
        one.optimizer.state.clear()
        # A first step has fewer operators: there is no state to copy.
        with metered(CPU), AtOperator() as count:
            one.step()
        for number in room.places(count.seen, 6):
            one.optimizer.state.clear()
            begin = one.now()
            error = one.fails(AtOperator(number), whole=True)
            assert isinstance(error, Injected)
            one.check_same(one.now(), begin)
            happened += 1
        one.check_next()
    return happened


def signalled(room: Room, at: int, times: int, make: Callable[[], Whole]) -> BaseException | None:
    """Ctrl-C, as a signal, in the update of a parameter."""
    one = make()
    calls: list[int] = []

    def made(real: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            calls.append(1)
            if len(calls) == at:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            real()

        return step

    with room.patch.context() as undone:
        patch_step(undone, one.optimizer, made)
        before, after = one.now(), one.after()
        error = one.fails(whole=True)
    one.check_same(one.now(), after if times == 1 else before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    one.check_next()
    return error


@fault(
    Part.WHOLE,
    "Ctrl-C in an update",
    "the step is finished first, and everything as after it; KeyboardInterrupt says so",
)
def ctrl_c(room: Room) -> int:
    error = signalled(room, 1, 1, lambda: whole(undo=False))
    assert isinstance(error, KeyboardInterrupt)
    assert "everything is as after it" in "".join(error.__notes__)
    return 1


@fault(Part.WHOLE, "Ctrl-C twice in an update", f"KeyboardInterrupt at once; {_BEFORE}")
def ctrl_c_twice(room: Room) -> int:
    error = signalled(room, 1, 2, KINDS[""])
    assert isinstance(error, KeyboardInterrupt)
    assert "taken back" in "".join(error.__notes__)
    return 1


@fault(Part.WHOLE, "a hook on an input's gradient fails", f"its own error; {_BEFORE}", slow=True)
def input_hook(_room: Room) -> int:
    one = Whole(undo=True, offloaded=False, wants_input=True)
    error = one.fails(step=one.hooked, whole=True)
    assert isinstance(error, Injected)
    one.check_next()
    return 1


@fault(
    Part.WHOLE, "a step is begun within a step", "an error that says so; the outer step is right"
)
def nested(room: Room) -> int:
    one = whole(undo=True)
    found: list[str] = []

    def made(real: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            if not found:
                found.append(str(error_of(one.run)))
            real()

        return step

    patch_step(room.patch, one.optimizer, made)
    one.check_next()
    assert found
    assert "running already" in found[0]
    return 1
