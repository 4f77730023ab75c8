"""Assumptions on how data-dependent branches of a forward go, checked in each planned call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from memopt.errors import ExecutionError, MemoptError
from memopt.step.input_values import InputValueError

ASSUMED = "assumed"
_MOST_OTHERWISE = 8
_CALLS_UNTRIED = 64
_TURNED = 2


@dataclass(frozen=True)
class Assumption:
    """How a data-dependent branch is assumed to go.

    Attributes:
        goes: the truth of the value that decides it.
        shown: where it is, for people.
        raises: whether the forward raises an error where it goes the other way.
        values: how many tensors decide it.
        decide: computes the truth from their numbers; None: it is the one tensor's.
        usual: whether it goes so as a rule, whatever the example was.
    """

    goes: bool
    shown: str
    raises: bool = False
    values: int = 1
    decide: GraphModule | None = None
    usual: bool = False


@dataclass
class Odds:
    """Tells which calls run unplanned at once, since most calls before went otherwise than assumed:
    then the plan is tried in one call of many.

    Attributes:
        turned: how many calls in succession went otherwise than the example did.
    """

    turned: int = 0
    _otherwise: int = 0
    _untried: int = 0

    def note(self, otherwise: bool, turned: bool = False) -> None:
        """Note how a planned call went."""
        self.turned = self.turned + 1 if turned else 0
        self._otherwise = max(0, self._otherwise + (1 if otherwise else -1))
        if self._otherwise == _MOST_OTHERWISE:
            self._otherwise, self._untried = _MOST_OTHERWISE - 1, _CALLS_UNTRIED

    @property
    def have_turned(self) -> bool:
        """Return whether calls go otherwise than the example by now."""
        return self.turned >= _TURNED

    def check(self, another: bool) -> None:
        """Check that calls go as the example did.

        Args:
            another: whether another plan can be made.

        Raises:
            InputValueError: the last ones did not, and have a plan of their own.
        """
        if another and self.have_turned:
            raise InputValueError("a branch on a value goes another way than planned by now")

    def leave_out(self) -> bool:
        """Return whether the next call runs unplanned."""
        self._untried -= self._untried > 0
        return self._untried > 0


class AssumptionError(ExecutionError):
    """A branch does not go as assumed: the call is to run without a plan."""


class BranchError(AssumptionError):
    """A branch goes on another way than assumed, or may have to.

    Attributes:
        turned: whether a plan made for such a call would go that way.
    """

    turned = False


def assumptions_of(traced: GraphModule) -> tuple[Assumption, ...]:
    """Return the assumptions of a trace. If it has some, its graph returns a pair: what the model
    returns, and the values that decide the branches."""
    found: tuple[Assumption, ...] = traced.meta.get(ASSUMED, ())
    return found


def values_of(assumed: Sequence[Assumption]) -> int:
    """Return how many tensors decide branches."""
    return sum(one.values for one in assumed)


@contextmanager
def failing_as_assumed(assumed: Sequence[Assumption], and_numbers: bool = False) -> Iterator[None]:
    """Turn an error of an operator inside into an AssumptionError, so that the call runs unplanned:
    there a branch may avoid the operator, or raise an error of its own first.

    Args:
        assumed: the assumptions of what runs inside.
        and_numbers: whether Python's errors of numbers (`1 / h.sum().item()`) are turned into one,
            too: raised by the unplanned call, they come after the random numbers of eager's.

    Raises:
        BranchError: an operator fails, and there are assumptions, or it computes a number.
    """
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        of_number = and_numbers and isinstance(error, (ArithmeticError, ValueError))
        if isinstance(error, (MemoptError, torch.OutOfMemoryError)) or not (assumed or of_number):
            raise
        shown = assumed[0].shown if assumed else ""
        way = f", perhaps since a branch on a value ({shown}) goes another way than planned"
        raise BranchError(
            f"an operator fails ({type(error).__name__}: {error}){way if assumed else ''}"
        ) from error


def nothing_assumed(_outputs: Sequence[object]) -> None:
    """Check nothing: the trace assumes nothing."""


def check_assumed(assumed: Sequence[Assumption], values: Sequence[torch.Tensor]) -> None:
    """Check the values that decide the branches of a call. This waits for the device, as eager does
    at each branch.

    Raises:
        AssumptionError: a branch does not go as assumed.
    """
    left = iter(values)
    for one in assumed:
        numbers = [next(left) for _ in range(one.values)]
        if one.decide is not None:
            numbers = [one.decide(*(number.item() for number in numbers))]
        if bool(numbers[0]) is one.goes:
            continue
        if one.raises:
            raise AssumptionError(f"a check in the forward fails: {one.shown}")
        error = BranchError(
            f"a branch of the forward depends on a value ({one.shown}) that is {not one.goes} in "
            f"this call, and planned as {one.goes}: if that happens often, write that part with "
            "tensor operators (torch.where)"
        )
        error.turned = not one.usual
        raise error


def alone(run: Callable[..., Any], _part: str) -> Callable[..., Any]:
    """Return a function as it is: no other rank runs it, too."""
    return run
