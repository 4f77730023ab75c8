"""Values that live as long as another object, and go with it even if Ctrl-C interrupts.

A finalizer written in Python (`__del__`, `weakref.finalize`) can itself be interrupted by Ctrl-C.
Python ignores that, and what the finalizer should free stays for ever. Here the interpreter's own
code frees it.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class TiedValue(weakref.ref[Any], Generic[V]):
    """A value kept for an object that may die at any time."""

    __slots__ = ("value",)

    value: V

    # Compare and hash the reference itself, since the object may be unhashable.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def tie(tied: set[TiedValue[V]], owner: object, value: V) -> TiedValue[V]:
    """Keep `value` in a set until `owner` dies."""
    reference: TiedValue[V] = TiedValue(owner, tied.discard)
    reference.value = value
    tied.add(reference)
    return reference
