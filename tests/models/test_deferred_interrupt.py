"""Calls that the end of an object makes, where a signal arrives while C code runs."""

from __future__ import annotations

import ctypes
import functools
import operator
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from memopt.models.deferred_interrupt import at_its_end

call = operator.methodcaller("__call__")


@pytest.fixture(autouse=True)
def nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is raised where Python can only drop it."""
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    yield
    assert not dropped


def end_with(number: int, held: list[Any]) -> None:
    """Have a signal arrive, and drop what is held, with no Python code between the two."""
    libc, kinds = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    libc.sigemptyset(kinds)
    libc.sigaddset(kinds, number)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    signal.pthread_kill(threading.get_ident(), number)  # another thread would take a process's
    arrives = functools.partial(libc.sigprocmask, int(signal.SIG_UNBLOCK), kinds, None)
    list(map(call, (arrives, held.clear)))
    for _ in range(500):
        time.sleep(0.01)


def leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(7)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_call_is_made_and_the_exception_raised(number: signal.Signals) -> None:
    calls: list[int] = []
    was = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
            end_with(number, [at_its_end(lambda: calls.append(1))])
    finally:
        signal.signal(signal.SIGTERM, was)
    assert calls == [1]
    assert repr(raised.value) == (
        "SystemExit(7)" if number == signal.SIGTERM else "KeyboardInterrupt()"
    )


def test_the_call_is_made_without_a_signal() -> None:
    calls: list[int] = []
    held = at_its_end(lambda: calls.append(1))
    assert not calls
    del held
    assert calls == [1]
