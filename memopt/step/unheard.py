"""Silences runs of a user's model and loss for planning: a forward that prints would print a dozen
times.

Inside, one thread's writes to standard output and standard error, its log records, and its warnings
from the user's code are dropped, dynamo's, whose advice is for `torch.compile`, and what anomaly
detection adds to an error. Other threads stay audible, and so do torch's other warnings and
memopt's own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from memopt.models.locks import ForkedLock

_STREAMS = ("stdout", "stderr")
_OWN = ("torch", "memopt")
_OF_DERIVED = "Error detected in "
"""How anomaly detection begins, which torch switches on to derive a backward. The error itself is
raised."""


class _Thread(threading.local):
    """Whether this thread is silenced."""

    unheard = False


_HERE = _Thread()
_CHANGING = ForkedLock()
_inside = 0
_restorers: list[Callable[[], None]] = []


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Silence the user's code in this thread inside."""
    global _inside
    with _CHANGING:
        if not _inside:
            _restorers.extend(_listen())
        _inside += 1
    before, _HERE.unheard = _HERE.unheard, True
    try:
        yield
    finally:
        _HERE.unheard = before
        with _CHANGING:
            _inside -= 1
            while not _inside and _restorers:
                _restorers.pop()()


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    before, _HERE.unheard = _HERE.unheard, False
    try:
        yield
    finally:
        _HERE.unheard = before


class _Stream:
    """A stream that drops what silenced threads write; all else goes to the stream behind it."""

    def __init__(self, stream: Any) -> None:
        self.__dict__["_stream"] = stream

    def write(self, text: str) -> int:
        return len(text) if _HERE.unheard else int(self._stream.write(text) or 0)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stream"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream, name, value)


def _listen() -> Iterator[Callable[[], None]]:
    """Replace streams, log handling and warnings; yields functions that restore them."""
    for name in _STREAMS:
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Stream):
            yield _set(sys, name, _Stream(stream))
    handled, shown = logging.Logger.callHandlers, warnings.showwarning

    def handling(self: logging.Logger, record: logging.LogRecord) -> None:
        if _HERE.unheard and record.name.partition(".")[0] not in _OWN:
            return
        with _heard():
            handled(self, record)

    def showing(message: Any, category: Any, filename: str, lineno: int, *where: Any) -> None:
        derived = str(message).startswith(_OF_DERIVED)
        if _HERE.unheard and (derived or _is_unheard(sys._getframe(1))):
            _forget(str(message), category, lineno)
            return
        with _heard():
            shown(message, category, filename, lineno, *where)

    yield _set(logging.Logger, "callHandlers", handling)
    yield _set(warnings, "showwarning", showing)


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; return a function that restores it, if it is still set."""
    before = getattr(owner, name)
    setattr(owner, name, value)

    def restore() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)

    return restore


def _is_unheard(frame: types.FrameType | None) -> bool:
    """Return whether the user's code or Dynamo has warned: the code of this frame is not the rest
    of torch's, and calls `warnings.warn`. (A warning of torch's kernels is shown at the line that
    ran the kernel, which does not call `warn`.)"""
    while frame is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    if frame is None or (name.partition(".")[0] in _OWN and not name.startswith("torch._dynamo.")):
        return False
    return not {"warn", "warn_explicit"}.isdisjoint(frame.f_code.co_names)


def _forget(text: str, category: Any, lineno: int) -> None:
    """Forget a withheld warning, so that it is shown when it comes again."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        frame.f_globals.get("__warningregistry__", {}).pop((text, category, lineno), None)
        frame = frame.f_back
