"""Takes a negative log-likelihood apart: what it needs of each row, and their sum.

The loss of rows of log-probabilities [rows, classes] reads one of each row. These are gathered
into [rows, 1], row by row, and the loss is that of a single class: the same numbers, added up in
the same order.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from memopt.kernels.compiled.replace import KEPT_META, add_call
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.torch_private.operators import aten as _ATEN


def with_gathered_losses(
    model: nn.Module, captured: Captured, lowering: Lowering, block_bytes: int
) -> Lowering:
    """Take the losses of a captured step apart, in place; return its lowering. Losses with weights
    of classes, or whose ignored class is 0, stay."""
    graph = captured.module.graph
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=_ATEN.nll_loss_forward.default)
        if _gathered(node)
    ]
    return build(model, captured, block_bytes) if found else lowering


def _gathered(node: Node) -> bool:
    logs, target, weights, _, ignored = node.args
    given = logs.meta["val"]  # type: ignore[union-attr]
    if weights is not None or ignored == 0 or given.dim() != 2 or given.shape[1] == 1:
        return False

    def make(call: Any, *args: Any) -> Node:
        one = add_call(node.graph, given.fake_mode, call, *args)
        one.meta |= {key: node.meta[key] for key in KEPT_META if key in node.meta}
        return one

    with node.graph.inserting_before(node):
        counted = make(_ATEN.ne.Scalar, target, ignored)
        named = make(_ATEN.where.ScalarOther, counted, target, 0)
        index = make(_ATEN.unsqueeze.default, named, 1)
        picked = make(_ATEN.gather.default, logs, 1, index)
        single = make(_ATEN.where.ScalarSelf, counted, 0, target)
    node.args = (picked, single, *node.args[2:])
    return True
