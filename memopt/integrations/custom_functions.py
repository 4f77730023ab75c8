"""Restoring custom autograd functions in Dynamo's graphs.

Dynamo replaces such a function by an operator that holds its forward and backward as graphs, and
rejects this operator when the graph is traced again. So a function with both graphs replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node


def with_custom_functions(module: GraphModule) -> GraphModule:
    """Restore a graph's custom functions in place. Operators of another form than that of torch
    2.11 to 2.13 are left."""
    apply = torch.ops.higher_order.autograd_function_apply
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=apply):
        forward, backward = (_body(module, one) for one in node.args[:2])
        if forward is None or backward is None:
            continue
        marks = (
            tuple(node.kwargs.get(f"{name}_idx", ())) for name in ("dirty", "non_differentiable")
        )
        with module.graph.inserting_before(node):
            made = module.graph.call_function(
                _function(forward, backward, *marks), tuple(node.args[2:])
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
        changed = True
    if changed:
        module.recompile()
    return module


def _body(module: GraphModule, named: Any) -> Any:
    if not isinstance(named, Node) or named.op != "get_attr":
        return None
    found = getattr(module, str(named.target), None)
    return found if isinstance(found, GraphModule) else None


def _function(
    run: GraphModule, run_backward: GraphModule, dirty: Sequence[int], constant: Sequence[int]
) -> Callable[..., Any]:
    """Make a function that takes the operands of Dynamo's operator.

    Args:
        run: operands → (the function's results, a tuple of the values that its backward reads).
        run_backward: (gradients, these values) → gradients of the operands.
        dirty, constant: positions of results that are operands changed in place, and of results
            without a gradient.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            result, kept = run(*operands)
            ctx.tensors = [isinstance(one, torch.Tensor) for one in kept]
            ctx.others = [one for one in kept if not isinstance(one, torch.Tensor)]
            ctx.save_for_backward(*[one for one in kept if isinstance(one, torch.Tensor)])
            results = result if isinstance(result, (tuple, list)) else (result,)
            if dirty:
                ctx.mark_dirty(*[results[i] for i in dirty])
            if constant:
                ctx.mark_non_differentiable(*[results[i] for i in constant])
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved, others = list(ctx.saved_tensors), list(ctx.others)
            kept = [saved.pop(0) if is_tensor else others.pop(0) for is_tensor in ctx.tensors]
            return run_backward(*gradients, *kept)

    def custom_function(*operands: Any) -> Any:
        return Function.apply(*operands)  # type: ignore[no-untyped-call]

    return custom_function
