"""Takes the logarithm of a softmax apart into operators.

As one operator its result is kept for its backward, as large as the logits. Taken apart it is
pointwise in the logits and two small reductions, so that kernels of the backward can recompute it
from the matrix product (`rematerialise.py`), as `torch.compile`'s do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node

from memopt.kernels.compiled.replace import KEPT_META, add_call
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.torch_private.operators import aten as _ATEN


def with_parts(
    model: nn.Module, captured: Captured, lowering: Lowering, block_bytes: int
) -> Lowering:
    """Take the logarithms of softmaxes in a captured step apart, in place; return its lowering.

    A logarithm of images stays, and so does one that is a result of the step, is empty, or would
    be laid out otherwise than ATen's.
    """
    graph = captured.module.graph
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=_ATEN._log_softmax.default)
        if _taken_apart(node)
    ]
    for node in found:
        graph.erase_node(node)
    return build(model, captured, block_bytes) if found else lowering


def _taken_apart(node: Node) -> bool:
    """Replace the uses of a call by its parts; return whether that was possible."""
    x, dim, _ = node.args
    given: torch.Tensor = x.meta["val"]  # type: ignore[union-attr]
    result: torch.Tensor = node.meta["val"]
    named = any(user.op == "output" for user in node.users)
    # The loss of images reads it in ATen's layout, in its forward and its backward.
    if named or not given.numel() or given.dim() > 3 or given.stride() != result.stride():
        return False
    computing = torch.promote_types(given.dtype, torch.float32)

    def make(target: Any, *args: Any, **kwargs: Any) -> Node:
        one = add_call(node.graph, given.fake_mode, target, *args, **kwargs)  # type: ignore[attr-defined]
        one.meta |= {key: node.meta[key] for key in KEPT_META if key in node.meta}
        return one

    def converted(one: Any, dtype: torch.dtype) -> Node:
        if one.meta["val"].dtype == dtype:
            return one  # type: ignore[no-any-return]
        return make(_ATEN._to_copy.default, one, dtype=dtype)

    with node.graph.inserting_before(node):
        wide = converted(x, computing)
        largest = make(_ATEN.amax.default, wide, [dim], True)
        shifted = make(_ATEN.sub.Tensor, wide, largest)
        total = make(_ATEN.sum.dim_IntList, make(_ATEN.exp.default, shifted), [dim], True)
        difference = make(_ATEN.sub.Tensor, shifted, make(_ATEN.log.default, total))
        made = converted(difference, result.dtype)
    # Views of the result are identified by its storage.
    made.meta["val"] = result
    node.replace_all_uses_with(made)
    return True
