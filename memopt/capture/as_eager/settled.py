"""Settles attributes that a forward sets to the same numbers at every call.

Swin of Hugging Face clamps its windows to the image in every forward. A planned step sets no
attribute. If only the first call changes such an attribute, and the model computes the same before
and after, the attribute gets its value when the model is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from memopt.step.inputs import Call
from memopt.user_code.restored_state import forward_restored

_PLAIN = (bool, int, float, str, type(None))
Values = dict[str, Any]


def settles(
    model: nn.Module, call: Call, changed: Iterable[str], unchanged: Callable[[], bool]
) -> bool:
    """Set attributes to the values that every later forward leaves in them.

    Args:
        model, call: the model to capture, and its call.
        changed: names of the modules whose attributes the forward sets, "model.layers.1".
        unchanged: whether the model, captured now, has the same graph as before.

    Returns:
        Whether they keep the values and the graph is the same; if not, the attributes are restored.
    """
    try:
        owners = [model.get_submodule(name.removeprefix("model").lstrip(".")) for name in changed]
    except AttributeError:
        return False  # not an attribute of a module
    before = [_plain(owner) for owner in owners]
    after = _set_by_a_call(model, call, owners)
    if after is None:
        return False
    _assign(owners, after)
    if _set_by_a_call(model, call, owners) == after and unchanged():
        return True
    for owner, new in zip(owners, after, strict=True):
        for name in new:
            owner.__dict__.pop(name, None)
    _assign(owners, before)
    return False


def _set_by_a_call(model: nn.Module, call: Call, owners: list[nn.Module]) -> list[Values] | None:
    """Return the plain attributes of modules after a call; None if it sets others."""
    others = [_others(owner) for owner in owners]
    with forward_restored(model, call):
        after = [_plain(owner) for owner in owners]
        same = others == [_others(owner) for owner in owners]
    return after if same else None


def _plain(owner: nn.Module) -> Values:
    return {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}


def _others(owner: nn.Module) -> dict[str, int]:
    """Return the ids of the other attributes' values."""
    return {name: id(v) for name, v in vars(owner).items() if not isinstance(v, _PLAIN)}


def _assign(owners: list[nn.Module], values: list[Values]) -> None:
    for owner, new in zip(owners, values, strict=True):
        owner.__dict__.update(new)
