"""Solvers run in a thread of their own, so that the caller can be told, and can interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from memopt.strategies.base import Progress, stops

POLL_S = 0.1
GRACE_S = 2.0
"""Seconds by which a solver may look at its own clock too late."""

T = TypeVar("T")


def call_in_thread(
    call: Callable[[], T],
    progress: Progress | None,
    what: Callable[[], str],
    *,
    limit_s: float | None = None,
    stop: Callable[[], None] | None = None,
) -> T | None:
    """Return what `call` returns; None where it is not waited for any longer.

    Without `stop`, a call that is interrupted, or that overruns, is left to itself: its thread
    ends at the solver's own time limit, or with the process.

    Args:
        call: what to run; it must let other threads run.
        progress: called now and then, in this thread; KeyboardInterrupt ends the wait.
        what: gives the text to report.
        limit_s: the solver's time limit, if it has one.
        stop: makes `call` return soon with what it has; it is then waited for.

    Raises:
        Whatever `call` raises.
    """
    if progress is None and limit_s is None:
        return call()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001  (the calling thread raises it)
            failed.append(error)

    thread = threading.Thread(target=run, name="memopt-solver", daemon=True)
    until = float("inf") if limit_s is None else time.monotonic() + limit_s + GRACE_S
    thread.start()
    thread.join(POLL_S)
    while thread.is_alive():
        if stops(progress, 0.5, what()) or time.monotonic() > until:
            if stop is None:
                return None
            while thread.is_alive():
                stop()
                thread.join(POLL_S)
        thread.join(POLL_S)
    if failed:
        raise failed[0]
    return done[0]
