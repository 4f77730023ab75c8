"""Tells how branches on values go in a training run in which all numbers are finite."""

from __future__ import annotations

from torch.fx import Node

_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isneginf": False, "isposinf": False}
_SAME = {"all", "any", "bool", "clone", "cpu", "detach", "item", "to"}
_NOT = {"bitwise_not", "inv", "invert", "logical_not", "not_"}
_BOTH = {"and_", "bitwise_and", "logical_and"}
_EITHER = {"bitwise_or", "logical_or", "or_"}
_EQUAL = {"eq": True, "ne": False}


def usual_outcome(node: Node) -> bool | None:
    """Return the truth of a value in a trace where all numbers are finite; None: it depends on
    more."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.strip("_") if name.startswith("__") else name
    if name in _FINITE:
        return _FINITE[name]
    if name in _EQUAL and node.args[0] is node.args[-1]:  # only NaN is not equal to itself
        return _EQUAL[name]
    operands = [usual_outcome(one) if isinstance(one, Node) else None for one in node.args[:2]]
    if not operands or operands[0] is None:
        return None
    if name in _SAME:
        return operands[0]
    if name in _NOT:
        return not operands[0]
    if name in _EQUAL and isinstance(node.args[1], bool):
        return (operands[0] is node.args[1]) is _EQUAL[name]
    if operands[1:] in ([], [None]):
        return None
    if name in _BOTH | {"and"}:
        return all(operands)
    return any(operands) if name in _EITHER | {"or"} else None
