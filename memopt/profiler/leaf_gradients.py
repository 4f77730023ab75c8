"""Gradients in the memory layout in which autograd keeps them, as part of a captured graph.

Autograd keeps a leaf's gradient in the leaf's own memory layout, or row-major where the leaf has
gaps; one that comes in another (expanded by `sum`, transposed, of a sliced input) it copies, after
the backward and past any plan. Traced here, the copy is planned, and its source freed after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from memopt.profiler.inputs import Call
from memopt.profiler.joint_split import split_joint
from memopt.profiler.memory_layout import is_dense

_ATEN = torch.ops.aten


def gradients_as_kept(module: GraphModule, call: Call) -> None:
    """Let a joint graph return each leaf's gradient as autograd keeps it; in place.

    Args:
        module: the joint graph.
        call: says which inputs are leaves. The gradients of the others are passed on as they are.
    """
    split = split_joint(module)
    if not split.tangents:
        return  # There is no backward.
    kept: dict[int, Node] = {}
    for position, (primal, gradient) in enumerate(zip(split.primals, split.gradients, strict=True)):
        if isinstance(gradient, Node) and _is_leaf(primal, call):
            like, value = primal.meta["val"], gradient.meta["val"]
            if not _keeps(value, like):
                kept[position] = _copy(module, split.output, gradient, like)
    if not kept:
        return
    gradients = [kept.get(i, gradient) for i, gradient in enumerate(split.gradients)]
    leaves, spec = pytree.tree_flatten(split.output.args[0], is_leaf=lambda x: x is None)
    leaves[len(leaves) - len(gradients) :] = gradients
    split.output.args = (pytree.tree_unflatten(leaves, spec),)
    module.recompile()


def _is_leaf(primal: Node, call: Call) -> bool:
    descriptor = primal.meta["desc"]
    if type(descriptor).__name__ != "PlainAOTInput":
        return True
    leaf = call.leaves[descriptor.idx]
    return isinstance(leaf, torch.Tensor) and leaf.is_leaf


def _keeps(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether autograd keeps a gradient of this layout as it is."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return True
    if not is_dense(leaf.shape, leaf.stride()):
        return gradient.is_contiguous()
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    return all(size == 1 or own == other for size, own, other in strides)


def _copy(module: GraphModule, output: Node, gradient: Node, leaf: torch.Tensor) -> Node:
    """The gradient copied: row-major in the order of the leaf's dimensions in memory."""
    order = list(range(leaf.dim()))
    if is_dense(leaf.shape, leaf.stride()):
        order.sort(key=lambda d: (leaf.stride(d), leaf.shape[d]), reverse=True)
    back = sorted(range(len(order)), key=order.__getitem__)

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = module.graph.call_function(target, args, kwargs)
        given, named = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        node.meta["val"] = target(*given, **named)
        return node

    with module.graph.inserting_before(output):
        rows = call(_ATEN.permute.default, gradient, order)
        rows = call(_ATEN.clone.default, rows, memory_format=torch.contiguous_format)
        return call(_ATEN.permute.default, rows, back)
