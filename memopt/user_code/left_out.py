"""Drops what a forward prints, logs or warns while it is captured: a planned step stays silent.

Such text changes no result, so it is no reason to refuse a model; but a user who waits for a line
must know why none comes. Dynamo drops such calls where it is told to, and those of loggers always,
silently.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from memopt.models.warned import warn
from memopt.torch_private.access import FILES_OF_TORCH, known, patched, private
from memopt.torch_private.dynamo import constant, constant_in_traces, functions_ignored

_CALL = "torch._dynamo.variables.misc.IgnoredFunctionVariable.call_function"
_METHOD = "torch._dynamo.variables.misc.LoggingLoggerVariable.call_method"
_HASH = "torch._dynamo.variables.StringFormatVariable.hash_impl"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_FILTERS = frozenset({warnings.filterwarnings, warnings.simplefilter, warnings.resetwarnings})
"""Left out without a word: they tell what is shown of words that are left out."""
_IGNORED = _FILTERS.union(
    {print, warnings.warn, logging.log, *(getattr(logging, name) for name in _LEVELS)}
)
_TOLD: set[str] = set()


@contextlib.contextmanager
def leaving_out_words() -> Iterator[None]:
    """Capture inside without the forward's prints, logs and warnings; tell of each place once."""
    found: dict[str, str] = {}

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        home, name = self.value.__module__.lstrip("_"), self.value.__name__
        if self.value not in _FILTERS and (home != "logging" or _shows(logging.root, name)):
            found[_place(tx)] = f"{name}()" if home == "builtins" else f"{home}.{name}()"
        return left_out(self, tx, args, kwargs)

    def logged(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("isEnabledFor", "getEffectiveLevel") and not kwargs:
            given = [one.as_python_constant() for one in args]
            return constant(getattr(self.value, name)(*given))
        if _shows(self.value, name):
            found[_place(tx)] = f"logging.getLogger({self.value.name!r}).{name}()"
        return logged_before(self, tx, name, args, kwargs)

    left_out, logged_before = private(_CALL), private(_METHOD)
    with (
        functions_ignored(_IGNORED),
        patched(_CALL, called),
        patched(_METHOD, logged),
        constant_in_traces(logging.getLogger),
        patched(_HASH, _refused_as_key) if known(_HASH) else contextlib.nullcontext(),
    ):
        yield
    for place, what in found.items():
        if place not in _TOLD:
            _TOLD.add(place)
            warn(
                f"the forward calls {what}{place}, which planned steps leave out: they compute the "
                "same and stay silent. Call it outside of the model, with what it returns; in "
                "evaluation it is called as before",
            )


def _refused_as_key(_text: Any, _translator: Any) -> None:
    """Refuse a text with a number that the trace does not know as a key: Dynamo takes it for one
    that is in no dict."""
    raise private("torch._dynamo.exc.TorchDynamoException")("Data-dependent text, used as a key")


def _shows(logger: logging.Logger, name: str) -> bool:
    """Return whether a logger's method would show anything."""
    level = _LEVELS.get(name)
    return level is None or logger.isEnabledFor(level)


def _place(tx: Any) -> str:
    """Return where in the user's code Dynamo is."""
    while tx is not None:
        frame = tx.frame_summary()
        if not frame.filename.startswith((FILES_OF_TORCH, os.path.dirname(logging.__file__))):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
        tx = tx.parent
    return ""
