"""torch's functional collectives, as they are in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


def is_collective(target: Any) -> bool:
    """Whether a call's target starts a collective."""
    return _in_namespace(target) and not is_wait(target)


def is_wait(target: Any) -> bool:
    """Whether a call's target waits for a collective, whose result it returns."""
    return _in_namespace(target) and target._schema.name.endswith("::wait_tensor")


def waited(result: Any) -> Any:
    """The result of a collective, once it is there."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    return pytree.tree_map_only(torch.Tensor, wait, result)


def _in_namespace(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES
