"""Defers Ctrl-C to the end of what must complete: a block, or a call that the end of an object
makes."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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


def at_its_end(call: Callable[[], object]) -> Iterator[None]:
    """Return an object whose end calls a function, whoever drops it.

    Signals that arrive while C++ waits (for a device, in a backward) are handled where Python runs
    next. In a finalizer that C++ runs, Python drops what their handler raises, and does not run the
    finalizer. Here the function is called, and the exception is raised in this thread after it.
    """
    ending = _ending(call)
    next(ending)
    return ending


def _ending(call: Callable[[], object]) -> Iterator[None]:
    try:
        yield  # until it is dropped: GeneratorExit
    finally:
        raised = None
        try:
            _handle_signals()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = error
        call()
        if raised is not None and not sys.is_finalizing():
            arguments = raised, threading.get_ident(), sys._getframe()
            threading.Thread(target=_raise_after, args=arguments, daemon=True).start()


def _handle_signals() -> None:
    """Do nothing: Python handles signals where a function begins."""


def _raise_after(error: BaseException, thread: int, frame: FrameType) -> None:
    """Raise an exception in a thread once it has left a frame."""
    left = False
    while not left:
        try:
            frame.clear()
            left = True
        except RuntimeError:  # it runs
            time.sleep(0.001)
    kind = type(error)  # Python takes a class, and calls it
    if error.args:
        kind = type(kind.__name__, (kind,), {"__new__": lambda *_: error})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
