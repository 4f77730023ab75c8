"""Traces a forward that looks at values of its own as it goes in a healthy training run.

`if not torch.isfinite(h).all(): h = torch.clamp(h, ...)` stands in many of Hugging Face's models
(DETR and its kin), `assert (x >= 0).all()` in many of the user's own. Dynamo cannot trace a branch
on a tensor's value, and of an assertion it makes an operator that nothing reads. But as a rule all
numbers are finite, and no check fails: so the forward is traced, and the values that decide are
returned by its graph. Each planned call looks at them, and runs unplanned where one is otherwise.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from memopt.models.warned import warn
from memopt.step.assumed import ASSUMED, Assumption
from memopt.step.traced_arguments import branches_returned
from memopt.torch_private.branches import (
    branches_decided,
    check_left,
    values_met,
    without_numbers,
)

_LOOKING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose trace met such a value."""
_REFUSED = re.compile(
    r"[Dd]ata-dependent|_local_scalar_dense|Pending unbacked|_check_tensor_all"
    r"|distributions/constraints\.py"
)
_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isneginf": False, "isposinf": False}
_SAME = {"all", "any", "bool", "clone", "cpu", "detach", "to"}
_NOT = {"bitwise_not", "inv", "invert", "logical_not", "not_"}
_BOTH = {"and_", "bitwise_and", "logical_and"}
_EITHER = {"bitwise_or", "logical_or", "or_"}


def looks_at_values(model: nn.Module, error: Exception) -> bool:
    """Return whether a model that could not be traced is to be traced as it goes as a rule, as it
    is from now on."""
    if model in _LOOKING or not _REFUSED.search(str(error)):
        return False
    _LOOKING.add(model)
    return True


def is_looking(model: nn.Module) -> bool:
    """Return whether a model is one that looks at values."""
    return model in _LOOKING


@contextlib.contextmanager
def branches_as_usual(model: nn.Module) -> Iterator[Callable[[GraphModule], bool]]:
    """Trace inside with a model's branches as they go as a rule, if it is one that has such.

    Returns:
        A function that notes in a graph that was traced what was assumed, and returns whether it
        has to be traced again: it turns out to have such.
    """
    if model not in _LOOKING:

        def found(traced: GraphModule) -> bool:
            if check_left(traced) is None:
                return False
            _LOOKING.add(model)
            return True

        yield found
        return
    with branches_decided(usual_outcome) as met, branches_returned(met.clear, values_met):

        def note(traced: GraphModule) -> bool:
            traced.meta[ASSUMED] = tuple(
                Assumption(one.goes, _place(one.node), one.raises) for one in met
            )
            without_numbers(traced)
            left = check_left(traced)
            if left is not None:
                warn(
                    f"planned steps leave out a check of values ({_place(left)}), which stands in "
                    "a checkpoint or another function that torch traces by itself: put it outside"
                )
            return False

        yield note


def usual_outcome(node: Node) -> bool | None:
    """Return the truth of a value in a trace where all numbers are finite; None: it depends on
    more."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.strip("_") if name.startswith("__") else name
    if name in _FINITE:
        return _FINITE[name]
    operands = [usual_outcome(one) if isinstance(one, Node) else None for one in node.args[:2]]
    if not operands or operands[0] is None:
        return None
    if name in _SAME:
        return operands[0]
    if name in _NOT:
        return not operands[0]
    if operands[1:] in ([], [None]):
        return None
    if name in _BOTH | {"and"}:
        return all(operands)
    return any(operands) if name in _EITHER | {"or"} else None


def _place(node: Node) -> str:
    """Return where a value is looked at, for people."""
    lines = [one.strip() for one in str(node.meta.get("stack_trace", "")).splitlines()]
    files: list[Any] = [i for i, one in enumerate(lines) if one.startswith("File ")]
    if not files:
        return str(node.target)
    code = lines[files[-1] + 1 :][:1]
    return ", ".join((*code, lines[files[-1]].replace("File ", "").replace(", in ", " in ")))
