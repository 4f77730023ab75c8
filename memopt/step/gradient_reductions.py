"""Finds the reductions of gradients over ranks in a captured step, so that several micro-batches
share one: as FSDP2 after `set_requires_gradient_sync(False)`.

A reduction begins where gradients are packed, padded or cut for it. What comes in there has the
dtype in which it is averaged, and is what FSDP2 adds up. Packing moves elements and adds nothing:
packed sums are sums of what was packed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch.fx import Node

from memopt.step.captured import Captured
from memopt.step.joined_collectives import AFTER_SCATTER
from memopt.torch_private.operators import aten as _ATEN
from memopt.torch_private.operators import collectives

_SCATTER = collectives().reduce_scatter_tensor.default
_REDUCE = collectives().all_reduce.default
_PACKS = frozenset(
    {
        _ATEN._chunk_cat.default,
        _ATEN.cat.default,
        _ATEN.constant_pad_nd.default,
        _ATEN.split.Tensor,
        operator.getitem,
    }
)


def reductions(captured: Captured) -> tuple[Node, ...]:
    """Return the calls that average gradients over the ranks, those that pack gradients for them
    and those that take averages apart, in their order.

    Args:
        captured: a step of a model that `memopt.shard` has spread over ranks.
    """
    wanted = [one for one in captured.gradients if isinstance(one, Node)]
    sends = [one for one in _reached(wanted, lambda node: node.all_input_nodes) if _averages(one)]
    found = {*sends, *(after for one in sends for after in _after(one))}
    stack = [*sends]
    while stack:
        for one in stack.pop().all_input_nodes:
            if one not in found and one.target in _PACKS and found.issuperset(one.users):
                found.add(one)
                stack.append(one)
    return tuple(sorted(found))


def _averages(node: Node) -> bool:
    """Return whether a call averages a gradient. A model's own collectives add, or what they give
    is used otherwise, or scattered."""
    if node.target not in (_SCATTER, _REDUCE) or node.args[1] != "avg":
        return False
    targets = {one.target for one in _after(node)}
    return targets <= AFTER_SCATTER


def _after(node: Node) -> set[Node]:
    """Return the calls that depend on one."""
    found = _reached([node], lambda one: [user for user in one.users if user.op != "output"])
    return found - {node}


def _reached(nodes: Iterable[Node], following: Callable[[Node], list[Node]]) -> set[Node]:
    """Return nodes, and what follows them."""
    stack = [*nodes]
    found = set(stack)
    while stack:
        more = [one for one in following(stack.pop()) if one not in found]
        found.update(more)
        stack += more
    return found
