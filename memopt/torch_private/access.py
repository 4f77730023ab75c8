"""Finding what a row names: the only way to torch's private names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from memopt.errors import CaptureError
from memopt.torch_private.rows import TABLE
from memopt.torch_private.table import KNOWN, SUPPORTED, Row

_MOVED = (
    "this torch ({version}) has no {name}, which memopt needs to {purpose}; memopt supports torch "
    f"{SUPPORTED[0]} to {SUPPORTED[-1]}"
)
_DEGRADED = (
    "this torch ({version}) has no {name}, which memopt needs to {purpose}: {instead} (memopt "
    f"supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}; said once)"
)

DECLARED = object()
"""In the place of an attribute that a class declares, and only its instances have."""
DEGRADED: Counter[str] = Counter()
"""How often memopt went on without which name."""


def private(name: str) -> Any:
    """What a row names.

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
    """What a row names; None, warned of once and counted, if this torch does not have it."""
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
    """Whether this torch has what a row names, of versions that differ in it.

    Raises:
        CaptureError: it does not, and its version should.
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
    """What gets a private attribute from an object, as fast as Python does.

    Raises:
        CaptureError: this torch's objects do not have it.
    """
    private(name)
    return operator.attrgetter(name.rpartition(".")[2])


@functools.cache
def attribute_name(name: str) -> str:
    """The name of a private attribute, for getattr and setattr.

    Raises:
        CaptureError: this torch's objects do not have it.
    """
    private(name)
    return name.rpartition(".")[2]


@contextlib.contextmanager
def required(name: str) -> Iterator[None]:
    """Import what a row names inside, by its own import statement, which type checkers read.

    Raises:
        CaptureError: this torch does not have it.
    """
    private(name)
    yield


@contextlib.contextmanager
def patched(name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of what a row names, and that back afterwards.

    Raises:
        CaptureError: this torch does not have it.
    """
    private(name)
    owner, last = _owner(TABLE[name])
    with mock.patch.object(owner, last, value):
        yield


def replace(name: str, value: Any) -> None:
    """Put `value` in the place of what a row names, for good.

    Raises:
        CaptureError: this torch does not have it.
    """
    private(name)
    owner, last = _owner(TABLE[name])
    setattr(owner, last, value)


def found(row: Row) -> Any:
    """What a row names; DECLARED of an attribute that only instances have.

    Raises:
        ImportError, AttributeError: this torch does not have it.
    """
    owner, last = _owner(row)
    return _part(owner, last)


def expected(row: Row) -> bool:
    """Whether the torch that is installed should have what a row names: its version is one of the
    row's, or one that nobody has looked at, and it is built with what the row needs."""
    import torch

    if row.needs == "cuda" and torch.version.cuda is None:
        return False
    if row.needs == "distributed" and not torch.distributed.is_available():
        return False
    version = ".".join(torch.__version__.split(".")[:2])
    return version in row.versions or version not in KNOWN


def missing(row: Row) -> CaptureError:
    """The error of a name that this torch does not have."""
    return CaptureError(_said(_MOVED, row))


def _said(text: str, row: Row) -> str:
    import torch

    return text.format(
        version=torch.__version__, name=row.name, purpose=row.purpose, instead=row.instead
    )


def _owner(row: Row) -> tuple[Any, str]:
    """What has the attribute that is the last part of a row's name, and that part."""
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
    """An attribute of an object, a module's submodule, or one that a class declares."""
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
