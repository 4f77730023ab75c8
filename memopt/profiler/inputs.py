"""The example call of a model, and how later calls are matched to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Call:
    """One call of a model: positional and keyword arguments, and their flat leaves."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """The flat values, in the order the captured graph takes them."""
        return pytree.tree_leaves((self.args, self.kwargs), is_leaf=lambda x: x is None)

    @property
    def spec(self) -> pytree.TreeSpec:
        """The structure of the arguments."""
        return pytree.tree_structure((self.args, self.kwargs), is_leaf=lambda x: x is None)

    def tensors(self) -> list[Tensor]:
        """The tensor leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def to_call(inputs: Any) -> Call:
    """A user's `inputs`: a tensor, a tuple/list of positional or a dict of keyword arguments."""
    if isinstance(inputs, Call):
        return inputs
    if isinstance(inputs, Mapping):
        wrong = [key for key in inputs if not isinstance(key, str)]
        if wrong:
            raise ValueError(f"inputs: keyword arguments need names, got the key {wrong[0]!r}")
        return Call((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Call(tuple(inputs), {})
    if isinstance(inputs, Tensor):
        return Call((inputs,), {})
    raise ValueError(
        "inputs must be a tensor, a tuple of positional arguments or a dict of keyword "
        f"arguments of the model, got {type(inputs).__name__}"
    )


def align(model: nn.Module, planned: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call `model(*args, **kwargs)` in the planned call's form, where the two differ only in
    passing an argument by position or by name; else the call as it is."""
    call = Call(args, kwargs)
    if len(args) == len(planned.args) and kwargs.keys() == planned.kwargs.keys():
        return Call(args, {name: kwargs[name] for name in planned.kwargs})
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
        wanted = signature.bind(*planned.args, **planned.kwargs).arguments
    except TypeError:
        return call
    if bound.keys() != wanted.keys():
        return call
    positional = list(wanted)[: len(planned.args)]
    if any(name not in planned.kwargs for name in list(wanted)[len(positional) :]):
        return call
    return Call(
        tuple(bound[name] for name in positional),
        {name: bound[name] for name in planned.kwargs},
    )
