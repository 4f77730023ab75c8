"""The backward of the negative log-likelihood without a scattered tensor, and without a sum.

Torch decomposes it into zeros and a scatter, which a single region keeps whole: for a language
model as much as its logits. (Inductor removes that from whole graphs.) As a comparison of the
classes with the target it is pointwise, and fuses with softmax's backward.

Softmax's backward sums the gradient over the classes. Behind this loss only the target's gradient
is not zero, so that softmax's backward is pointwise, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.kernels.compiled.replace import KEPT_META, add_call
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.torch_private.operators import aten
from memopt.torch_private.operators import aten as _ATEN

_LOSS = torch.ops.aten.nll_loss_backward.default
_SOFTMAX = aten._log_softmax_backward_data.default
_MEAN = 1
"""ATen's number of the mean reduction."""


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Compute `aten.nll_loss_backward`, argument by argument."""
    here, value = _parts(grad_output, self, target, reduction, ignore_index, total_weight)
    if weight is not None:
        value = value * weight
    return torch.where(here, value, 0.0).to(self.dtype)


def cross_entropy_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    output: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of the logits of a cross-entropy over classes: `aten.nll_loss_backward`
    followed by `aten._log_softmax_backward_data`.

    Args:
        grad_output, self, target, weight, reduction, ignore_index, total_weight: the arguments of
            `aten.nll_loss_backward`.
        output: the logarithm of the softmax.
        dtype: that of the logits.
    """
    here, value = _parts(grad_output, self, target, reduction, ignore_index, total_weight)
    counted = (target != ignore_index).unsqueeze(-1)
    if weight is not None:
        value = value * weight[torch.where(target != ignore_index, target, 0)].unsqueeze(-1)
    row = torch.where(counted, value, 0.0).to(self.dtype)
    return (torch.where(here, row, 0.0) - output.exp() * row).to(dtype)


def _parts(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a mask of the targets, and the gradient there without the class's weight."""
    grad = grad_output / total_weight if reduction == _MEAN else grad_output
    chosen = torch.where(target != ignore_index, target, -1).to(torch.int32).unsqueeze(-1)
    here = chosen == torch.arange(self.shape[-1], dtype=torch.int32, device=self.device)
    return here, -grad if grad.dim() == 0 else -grad.unsqueeze(-1)


def with_joined_losses(graph: FxGraph) -> FxGraph:
    """Return a copy of a region's graph in which the backward of a cross entropy is one call."""
    made = FxGraph()
    made.output(made.graph_copy(graph, {}))
    for node in made.find_nodes(op="call_function", target=_SOFTMAX):
        loss, output, dim, dtype = node.args
        classes = node.meta["val"].dim()
        if isinstance(loss, Node) and loss.target is _LOSS and dim in (classes - 1, -1):
            with made.inserting_before(node):
                arguments: tuple[Any, ...] = (*loss.args, output, dtype)
                joined = made.call_function(cross_entropy_backward, arguments)
            node.replace_all_uses_with(joined)
            made.erase_node(node)
            if not loss.users:
                made.erase_node(loss)
    return made


def with_parts(
    model: nn.Module, captured: Captured, lowering: Lowering, block_bytes: int
) -> Lowering:
    """Take the logarithms of softmaxes in a captured step apart, in place; return its lowering.

    As one operator its result is kept for its backward, as large as the logits. Taken apart it is
    pointwise in the logits and two small reductions, so that kernels of the backward can recompute
    it from the matrix product (`rematerialise.py`), as `torch.compile`'s do.
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
