"""Defers Ctrl-C to the end of a block that must complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_deferred() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C to the end of the block, once the yielded function has been called; a second
    Ctrl-C raises KeyboardInterrupt at once.

    Changes nothing outside the main thread, or where another handler is installed.
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
