"""AOTAutograd's function behind a planned output, made to take and give what autograd's own do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from memopt.step.memory_layout import order_of
from memopt.step.model_outputs import TracedOutputs
from memopt.torch_private import pytree
from memopt.torch_private.modes import differentiate_twice, function_of, is_batch


def prepare_backward(output: Any, outputs: TracedOutputs) -> None:
    """Change AOTAutograd's function behind a planned output in three ways. Its backward gets None
    for outputs without a gradient, where autograd would make zeros. It may return differentiable
    gradients: by itself it refuses a second derivative (torch 2.11 forgets to). And batches of
    gradients arrive in the layout that it wants."""
    leaves = pytree.tree_leaves(output)
    for position in outputs.copied:
        node: Any = getattr(leaves[position], "grad_fn", None)
        if differentiate_twice(function_of(node), _as_computed):
            node.set_materialize_grads(False)
            mine = (one for one in leaves if getattr(one, "grad_fn", None) is node)
            orders = {one.output_nr: order_of(one) for one in mine}
            node.register_prehook(partial(_batches_laid_out, orders))
            return


def _as_computed(_context: Any, compute: Any, _arguments: Any) -> Any:
    return compute()


def _batches_laid_out(
    orders: Mapping[int, tuple[int, ...]], gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """Lay out batches of gradients as the outputs are: AOTAutograd copies a gradient that is laid
    out otherwise, which fails for a batch."""
    if not any(map(is_batch, gradients)):
        return None
    laid_out = list(gradients)
    for at, order in orders.items():
        gradient = gradients[at]
        if gradient is not None:
            back = sorted(range(len(order)), key=order.__getitem__)
            laid_out[at] = gradient.permute(order).contiguous().permute(back)
    return tuple(laid_out)
