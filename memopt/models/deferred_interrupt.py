"""Defers Ctrl-C to the end of a block that must complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Deferral:
    """Whether Ctrl-C waits for the end of a block."""

    def __init__(self) -> None:
        self.asked = self._begun = False

    def begin(self) -> None:
        """Let Ctrl-C wait from now on; a second one raises KeyboardInterrupt at once.

        Changes nothing outside the main thread, or where another handler is installed.
        """
        main = threading.current_thread() is threading.main_thread()
        usual = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and not self._begun:
            self._begun = True
            signal.signal(signal.SIGINT, self._handle)

    def end(self) -> None:
        """Let Ctrl-C raise KeyboardInterrupt again."""
        if self._begun:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, _number: int, _frame: object) -> None:
        self.asked = True
        self.end()


@contextmanager
def ctrl_c_deferred() -> Iterator[Deferral]:
    """Defer Ctrl-C to the end of the block, once it has called `begin` of what is yielded."""
    deferral = Deferral()
    try:
        yield deferral
    finally:
        deferral.end()
    if deferral.asked:
        raise KeyboardInterrupt
