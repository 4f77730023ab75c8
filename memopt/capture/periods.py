"""What can be compared of operators, to find where a graph repeats itself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.torch_private.aot import FakeTensor

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
)


def read_by(node: Node) -> list[Node]:
    """Return what an operator reads, each as often as it is there."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose metadata says all that matters of it."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return False
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):  # inside functorch's transforms
        return False
    return value.layout is torch.strided and not value.is_quantized


def plain(value: Any) -> Hashable:
    """Return what can be compared of an operator's argument or result: of a tensor all that its
    metadata says, of a node only that it is one. What is not understood equals nothing else."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Node):
        return Node
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            return id(value)
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if any(type(size) is not int for size in sizes):
            return id(value)
        whole_bytes = value.untyped_storage().nbytes()
        about = (value.dtype, value.device, value.requires_grad, value.dim(), whole_bytes)
        return (torch.Tensor, *sizes, *about)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(plain, value))
    if isinstance(value, dict):
        return (dict, *((key, plain(one)) for key, one in value.items()))
    if isinstance(value, slice):
        return slice, plain(value.start), plain(value.stop), plain(value.step)
    return id(value)
