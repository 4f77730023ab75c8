"""Values that a forward reads of its inputs in Python: `int(lengths.max())`, `if mask.all():`.

They are part of what a plan is made for, as shapes are. Each has a graph that computes it from a
call's flat arguments, which is run before a planned step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from memopt.errors import GuardError

VALUES = "values"
"""Key under which a traced graph's `meta` has what the forward reads of its inputs' values."""
READ = "read"
"""Key of what the forward reads out of tensors, in order; None where the trace does not know it."""
NUMBERS = "numbers"
"""Key of the positions of results in whose places the model returns, or leaves, a number."""
LOOKED = "looked"
"""Key of all answers that its trace got, see `Call.looked`."""

UNREADABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a value that the inputs do not have."""
MOST_PLANS = 8
"""Most plans for calls that differ in what the forward reads of their inputs' values."""


class InputValueError(GuardError):
    """A call's inputs have other values than those that a plan was made for."""


@dataclass(frozen=True, eq=False)
class InputValue:
    """A value that the forward reads of its inputs.

    Attributes:
        compute: computes it from a call's flat arguments.
        truth: whether only its truth counts.
        planned: what it was when the graph was captured.
        shown: where it is read, for people.
    """

    compute: GraphModule
    truth: bool
    planned: Any
    shown: str

    def read(self, leaves: Sequence[Any]) -> Any:
        """Return the value for a call's flat arguments."""
        with torch.no_grad():
            found = self.compute(*leaves)
        if self.truth:
            return bool(found)
        return frozen(found.tolist() if isinstance(found, torch.Tensor) else found)


def frozen(value: Any) -> Any:
    """Return lists, and lists in them, as tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def other_values(values: Sequence[InputValue], leaves: Sequence[Any]) -> Iterator[str]:
    """Yield which values of a call are not the planned ones. Those behind the first may not be what
    the forward would read."""
    for one in values:
        try:
            found = one.read(leaves)
        except torch.OutOfMemoryError:
            raise
        except UNREADABLE as error:
            yield f"the forward reads its inputs' values ({one.shown}), and cannot: {error}"
            continue
        if found != one.planned:
            yield (
                f"the forward reads its inputs' values ({one.shown}): planned {one.planned!r}, "
                f"got {found!r}"
            )
