"""Look-up of the names in the table: the only way to torch's private names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from memopt.errors import CaptureError
from memopt.torch_private.rows import TABLE
from memopt.torch_private.table import KNOWN, SUPPORTED, Row

FILES_OF_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
"""What paths of torch's own files begin with; those of torchvision or torch_geometric do not."""
FILES_OF_MEMOPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""What paths of memopt's own files begin with."""

_MOVED = (
    "this torch ({version}) has no {name}, which memopt needs to {purpose}; memopt supports torch "
    f"{SUPPORTED[0]} to {SUPPORTED[-1]}"
)
_DEGRADED = (
    "this torch ({version}) has no {name}, which memopt needs to {purpose}: {instead} (memopt "
    f"supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}; said once)"
)

DECLARED = object()
"""Stands for an attribute that a class only declares, and that its instances have."""
DEGRADED: Counter[str] = Counter()
"""Name → how often memopt went on without it."""


def private(name: str) -> Any:
    """Return the object that a row names.

    Raises:
        CaptureError: this torch does not have it.
        KeyError: there is no such row.
    """
    row = TABLE[name]
    try:
        return found(row)
    except (ImportError, AttributeError) as error:
        raise missing(row) from error


private_once = functools.cache(private)


def optional(name: str) -> Any | None:
    """Return the object that a row names; None, with a warning once and counted, without it."""
    row = TABLE[name]
    assert row.instead, name
    try:
        return found(row)
    except (ImportError, AttributeError):
        if expected(row):
            if not DEGRADED[name]:
                warnings.warn(_said(_DEGRADED, row), stacklevel=2)
            DEGRADED[name] += 1
        return None


@functools.cache
def known(name: str) -> bool:
    """Whether this torch has a name that only some versions have.

    Raises:
        CaptureError: it does not, although its version should.
    """
    row = TABLE[name]
    try:
        found(row)
    except (ImportError, AttributeError) as error:
        if expected(row):
            raise missing(row) from error
        return False
    return True


def attribute(name: str) -> Callable[[Any], Any]:
    """Return the getter of a private attribute, as fast as Python's own access.

    Raises:
        CaptureError: this torch's objects do not have it.
    """
    private(name)
    return operator.attrgetter(name.rpartition(".")[2])


@functools.cache
def attribute_name(name: str) -> str:
    """Return the name of a private attribute, for getattr and setattr.

    Raises:
        CaptureError: this torch's objects do not have it.
    """
    private(name)
    return name.rpartition(".")[2]


@contextlib.contextmanager
def required(name: str) -> Iterator[None]:
    """Check a name that the code inside imports by a statement of its own, for type checkers.

    Raises:
        CaptureError: this torch does not have it.
    """
    private(name)
    yield


@contextlib.contextmanager
def patched(name: str, value: Any) -> Iterator[None]:
    """Replace the object that a row names by `value`, and restore it afterwards.

    Raises:
        CaptureError: this torch does not have it.
    """
    private(name)
    owner, last = _owner(TABLE[name])
    with mock.patch.object(owner, last, value):
        yield


def replace(name: str, value: Any) -> None:
    """Replace the object that a row names by `value` for good.

    Raises:
        CaptureError: this torch does not have it.
    """
    private(name)
    owner, last = _owner(TABLE[name])
    setattr(owner, last, value)


def found(row: Row) -> Any:
    """Return the object that a row names; DECLARED for an attribute that only instances have.

    Raises:
        ImportError, AttributeError: this torch does not have it.
    """
    owner, last = _owner(row)
    return _part(owner, last)


def expected(row: Row) -> bool:
    """Whether the installed torch should have a row's name: its version is one of the row's or not
    yet compared with the table, and it is built with what the row needs."""
    import torch

    if row.needs == "cuda" and torch.version.cuda is None:
        return False
    if row.needs == "distributed" and not torch.distributed.is_available():
        return False
    version = ".".join(torch.__version__.split(".")[:2])
    return version in row.versions or version not in KNOWN


def missing(row: Row) -> CaptureError:
    """Make the error for a name that this torch does not have."""
    return CaptureError(_said(_MOVED, row))


def _said(text: str, row: Row) -> str:
    import torch

    return text.format(
        version=torch.__version__, name=row.name, purpose=row.purpose, instead=row.instead
    )


def _owner(row: Row) -> tuple[Any, str]:
    """Return the owner of the attribute that a row names, and the attribute's name."""
    home, _, last = row.name.rpartition(".")
    if row.of is not None:
        try:
            return row.of(), last
        except (TypeError, RuntimeError) as error:
            raise AttributeError(f"{row.name}: {error}") from error
    owner: Any = importlib.import_module("torch")
    for part in home.split(".")[1:]:
        owner = _part(owner, part)
    return owner, last


def _part(owner: Any, name: str) -> Any:
    """Get an attribute of an object, a submodule of a package, or DECLARED."""
    try:
        return getattr(owner, name)
    except AttributeError:
        if isinstance(owner, type) and _declares(owner, name):
            return DECLARED
        if not isinstance(owner, types.ModuleType) or not hasattr(owner, "__path__"):
            raise
        return importlib.import_module(f"{owner.__name__}.{name}")


def _declares(owner: type, name: str) -> bool:
    """Whether a class has an attribute in its annotations."""
    return any(name in vars(one).get("__annotations__", ()) for one in owner.__mro__)
