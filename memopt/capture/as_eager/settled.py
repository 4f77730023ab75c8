"""Attributes that a forward sets to the same numbers at every call, once it has been called.

Swin of Hugging Face clamps its windows to the image in every forward. A planned step sets nothing;
where the first call changes such an attribute and no other does, and the model computes the same
before and after, the attribute gets its value when the model is captured, as the first call would
have given it.
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
    """Give attributes that the forward sets the values at which they stay.

    Args:
        model, call: what is captured.
        changed: the modules whose attributes the forward sets, "model.layers.1".
        unchanged: whether the model, captured now, is the graph that it was before.

    Returns:
        Whether they stay, and the graph is the same; if not, the attributes are as they were.
    """
    try:
        owners = [model.get_submodule(name.removeprefix("model").lstrip(".")) for name in changed]
    except AttributeError:
        return False  # not of a module
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
    """The plain attributes of modules after a call; None if it sets others."""
    others = [_others(owner) for owner in owners]
    with forward_restored(model, call):
        after = [_plain(owner) for owner in owners]
        same = others == [_others(owner) for owner in owners]
    return after if same else None


def _plain(owner: nn.Module) -> Values:
    return {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}


def _others(owner: nn.Module) -> dict[str, int]:
    """Which objects the other attributes are."""
    return {name: id(v) for name, v in vars(owner).items() if not isinstance(v, _PLAIN)}


def _assign(owners: list[nn.Module], values: list[Values]) -> None:
    for owner, new in zip(owners, values, strict=True):
        owner.__dict__.update(new)
