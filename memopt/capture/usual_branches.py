"""Traces a forward that looks whether its values are finite, as if they were.

`if not torch.isfinite(h).all(): h = torch.clamp(h, ...)` stands in many of Hugging Face's models
(DETR and its kin). Dynamo cannot trace a branch on a tensor's value. But all such checks go one way
in a healthy training run, so that the branch is traced that way, and the values that decide it are
returned by the graph: each planned call looks at them, and runs unplanned where one is otherwise.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from memopt.step.assumed import ASSUMED, Assumption
from memopt.step.ranks import ranks_of
from memopt.step.traced_arguments import branches_returned
from memopt.torch_private.branches import branches_decided, values_met

_LOOKING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose trace met such a branch."""
_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isneginf": False, "isposinf": False}
_SAME = {"all", "any", "bool", "detach", "to"}
_NOT = {"bitwise_not", "inv", "invert", "logical_not", "not_"}
_BOTH = {"and_", "bitwise_and", "logical_and"}
_EITHER = {"bitwise_or", "logical_or", "or_"}


def looks_at_values(model: nn.Module, error: Exception) -> bool:
    """Return whether a model that could not be traced is to be traced with its branches as usual,
    as it is from now on. Ranks that communicate in a forward cannot run it again alone."""
    if model in _LOOKING or "Data-dependent branching" not in str(error):
        return False
    if ranks_of(model) is not None:
        return False
    _LOOKING.add(model)
    return True


@contextlib.contextmanager
def branches_as_usual(model: nn.Module) -> Iterator[Callable[[GraphModule], None]]:
    """Trace inside with a model's branches as they usually go, if it is one that has such.

    Returns:
        A function that notes in a graph that was traced what was assumed.
    """
    if model not in _LOOKING:
        yield lambda _: None
        return
    with branches_decided(usual_outcome) as met, branches_returned(met.clear, values_met):

        def note(traced: GraphModule) -> None:
            traced.meta[ASSUMED] = tuple(Assumption(goes, _place(node)) for _, node, goes in met)

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
