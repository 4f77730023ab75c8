"""Writes what a forward assigns to a parameter's or buffer's `.data` to the memory that it has.

A graph's tensors keep their memory. To a forward both are the same unless something reads the old
values, or the new ones in the memory in which they were computed, later.
"""

from __future__ import annotations

from itertools import takewhile
from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from memopt.step.memory_layout import storage_of
from memopt.torch_private.access import private

_SET = getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)  # from torch 2.14 on
_READ = private("torch._C._autograd._get_data_attr")


def write_assigned_data(traced: GraphModule) -> None:
    """Replace assignments to `.data` in Dynamo's graph by copies where both are the same."""
    for node in traced.graph.find_nodes(op="call_function", target=_SET):
        owner, *given = node.args
        if not isinstance(owner, Node) or owner.op != "get_attr" or len(given) != 1:
            continue
        (value,) = given
        if isinstance(value, Node) and _is_copy(traced, owner, value, node):
            with traced.graph.inserting_before(node):
                copied = traced.graph.call_method("copy_", (owner, value))
            copied.meta.update(node.meta)
            for one in (*node.users, node):
                traced.graph.erase_node(one)


def _is_copy(traced: GraphModule, owner: Node, value: Node, at: Node) -> bool:
    """Return whether `owner.data = value` may be a copy: both have one layout, nothing has read the
    owner but through `.data`, and nothing later reads the old values or the value's memory."""
    before = set(takewhile(lambda node: node is not at, traced.graph.nodes))
    owners = traced.graph.find_nodes(op="get_attr", target=owner.target)
    readers = {user for one in owners for user in one.users if user in before}
    if any(user.target is not _READ for user in readers):
        return False
    real, made = attrgetter(str(owner.target))(traced), value.meta.get("example_value")
    if not isinstance(made, Tensor) or _layout(made) != _layout(real):
        return False
    held = (*traced.parameters(), *traced.buffers())
    if any(one is not real and storage_of(one) == storage_of(real) for one in held):
        return False
    new, old = storage_of(made), set(map(_storage, readers))
    later = [one for one in traced.graph.nodes if one not in before and one not in (at, *at.users)]
    read = {one for node in later for one in node.all_input_nodes if one not in owners}
    given = {
        one
        for one in traced.graph.nodes
        if one.op in ("placeholder", "get_attr") and one not in owners
    }
    kept = set(map(_storage, read)) & {new, *old}
    return not kept and new not in set(map(_storage, given))


def _storage(node: Node) -> int | None:
    value = node.meta.get("example_value")
    return storage_of(value) if isinstance(value, Tensor) else None


def _layout(value: Tensor) -> tuple[object, ...]:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
