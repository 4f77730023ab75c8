"""Ctrl-C that waits for the end of what must be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_deferred() -> Iterator[Callable[[], None]]:
    """Once the yielded function has been called, Ctrl-C raises KeyboardInterrupt only at the end
    of the block, which finishes first; a second Ctrl-C raises at once.

    Changes nothing outside the main thread, or where somebody else handles the signal.
    """
    usual = signal.default_int_handler
    asked = begun = False

    def handle(_number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, usual)

    def begin() -> None:
        nonlocal begun
        main = threading.current_thread() is threading.main_thread()
        if not begun and main and signal.getsignal(signal.SIGINT) is usual:
            begun = True
            signal.signal(signal.SIGINT, handle)

    try:
        yield begin
    finally:
        if begun:
            signal.signal(signal.SIGINT, usual)
    if asked:
        raise KeyboardInterrupt
