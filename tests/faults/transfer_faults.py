"""Faults in copies to the host and back, and in the host memory that they need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memopt.executor import swap
from memopt.executor.worker import Worker
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import Injected, failing, fails_with
from tests.faults.step_faults import AFTER_FORWARD, AS_BEFORE
from tests.faults.subjects import DropIn, drop_in

_COPIES = 4
"""Copies of a step that are let fail, one after the other; there are at least so many."""


_BROKEN = Injected("injected: the link is broken")
Target = Callable[[DropIn], Any]
Patch = Callable[[DropIn, int, pytest.MonkeyPatch], None]


def forward(one: DropIn) -> None:
    one.forward(nullcontext())


def backward(one: DropIn) -> None:
    one.backward(nullcontext())


def fails_at(
    room: Room,
    program: str,
    half: Callable[[DropIn], None],
    patch: Patch,
    error: type[BaseException] = Injected,
    many: bool = True,
) -> int:
    """Let the k-th call of something fail; the next step is right."""
    one = drop_in(program)
    happened = 0
    for number in room.places(_COPIES if many else 1):
        with room.patch.context() as undone:
            patch(one, number, undone)
            found = one.fails(step=partial(half, one))
        assert isinstance(found, error), found
        happened += 1
    one.check_next()
    return happened


def attribute(target: Target, name: str, error: BaseException = _BROKEN) -> Patch:
    """A patch that lets the k-th call of an attribute of `target(subject)` fail."""

    def patch(one: DropIn, number: int, room: pytest.MonkeyPatch) -> None:
        owner = target(one)
        room.setattr(owner, name, failing(getattr(owner, name), number, error))

    return patch


_STARTS: tuple[tuple[str, str, Callable[[DropIn], None], Target, str], ...] = (
    ("a copy out cannot start", "swap_all", forward, lambda one: one.swap, "out"),
    ("a copy out fails on its thread", "swap_all", forward, lambda one: swap, "_fill"),
    ("a copy in cannot start", "swap_all", backward, lambda one: one.swap, "bring"),
    ("a copy in fails on its thread", "swap_all", backward, lambda one: swap, "_empty_into"),
    ("a copy on a stream fails", "streams", forward, lambda one: one.streams, "copy"),
    (
        "no device memory for a copy in",
        "streams",
        backward,
        lambda one: one.streams,
        "device_bytes",
    ),
    ("waiting for a copy fails", "streams", backward, lambda one: one.streams, "wait"),
)
for _what, _program, _half, _target, _name in _STARTS:
    _promise = f"its own error; {AS_BEFORE if _half is forward else AFTER_FORWARD}"
    fault(Part.STEP, _what, _promise)(
        partial(fails_at, program=_program, half=_half, patch=attribute(_target, _name))
    )


@fault(Part.STEP, "the host has no memory for a copy", f"MemoryError; {AS_BEFORE}")
def host_memory(room: Room) -> int:
    def patch(_one: DropIn, number: int, room: pytest.MonkeyPatch) -> None:
        empty = failing(np.empty, number, MemoryError("injected: no host memory"))
        room.setattr(swap, "np", SimpleNamespace(**{**vars(np), "empty": empty}))

    return fails_at(room, "swap_all", forward, patch, MemoryError)


@fault(Part.STEP, "pinned memory is exhausted", f"torch's error; {AS_BEFORE}")
def pinned(room: Room) -> int:
    broken = attribute(lambda one: one.streams, "host_bytes", MemoryError("injected: pinned"))

    def patch(one: DropIn, number: int, room: pytest.MonkeyPatch) -> None:
        one.swap._free.clear()
        broken(one, number, room)

    return fails_at(room, "streams", forward, patch, MemoryError, many=False)


@fault(
    Part.STEP,
    "pinned memory is exhausted for a second step under way",
    "torch's error; the first step goes on and is right",
)
def pinned_twice(room: Room) -> int:
    one = drop_in("streams")
    after = one.after()
    begin = one.now()
    one.swap._free.clear()
    loss = one.forward(nullcontext())
    moved = one.now()
    with room.patch.context() as patch:
        broken = failing(one.streams.host_bytes, 1, MemoryError("injected: pinned"))
        patch.setattr(one.streams, "host_bytes", broken)
        fails_with(MemoryError, "pinned", lambda: one.forward(nullcontext()))
    one.check_same(one.now(), moved)
    loss.backward()
    one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=True)
    one.check_same(one.now(), after)
    begin.into(one.model, one.optimizer)
    one.check_next()
    return 1


@fault(Part.STEP, "the thread for copies cannot start", f"Python's error; {AS_BEFORE}")
def no_thread(room: Room) -> int:
    one = drop_in("swap_all")
    one.swap._worker = Worker("memopt-swap")

    def start(_: threading.Thread) -> None:
        raise RuntimeError("injected: can't start new thread")

    real = threading.Thread.start

    def forward_without_threads() -> None:
        threading.Thread.start = start  # type: ignore[method-assign]
        try:
            forward(one)
        finally:
            threading.Thread.start = real  # type: ignore[method-assign]

    error = one.fails(step=forward_without_threads)
    assert "can't start new thread" in str(error)
    one.check_next()
    return 1


def slow(room: Room, name: str) -> int:
    """Copies that take longer than everything else."""
    one = drop_in("swap_all")
    real = getattr(swap, name)

    def late(*args: Any) -> None:
        time.sleep(0.01)
        real(*args)

    room.patch.setattr(swap, name, late)
    one.check_next()
    assert one.fails() is None
    return 1


@fault(Part.STEP, "copies out are slow", "the step waits, and is right")
def slow_out(room: Room) -> int:
    return slow(room, "_fill")


@fault(Part.STEP, "copies in are slow", "the step waits, and is right")
def slow_in(room: Room) -> int:
    return slow(room, "_empty_into")
