"""Values that live as long as another object, and go with it whatever interrupts the program.

A finalizer written in Python (`__del__`, `weakref.finalize`) can itself be interrupted by Ctrl-C,
which Python then ignores, and what it was to give back stays for ever. Here the interpreter's own
code does it.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class TiedValue(weakref.ref[Any], Generic[V]):
    """A value kept for an object that may die at any time.

    Attributes:
        value: what is kept.
    """

    __slots__ = ("value",)

    value: V

    # Those of the reference itself: the object may be one that cannot be hashed.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def tie(tied: set[TiedValue[V]], owner: object, value: V) -> TiedValue[V]:
    """Keep `value` in a set until `owner` dies."""
    reference: TiedValue[V] = TiedValue(owner, tied.discard)
    reference.value = value
    tied.add(reference)
    return reference
