"""Parameters that a forward updates in place (`nn.Embedding(max_norm=...)`), in a captured graph.

A leaf that requires a gradient can be updated without autograd's knowledge only, so the gradient of
its new value is zero; AOTAutograd adds it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree


def _updated_parameter(tangent: Node) -> bool:
    """Whether a tangent belongs to the new value of a parameter."""
    output = getattr(tangent.meta.get("desc"), "output", None)
    source = getattr(output, "mutated_input", None)
    return type(source).__name__ == "ParamAOTInput"


def without_zero_gradients(module: GraphModule) -> None:
    """Add nothing to a parameter's gradient for the new value that the forward gives it; where
    the loss does not use that value there is no gradient, as in eager."""
    output = module.graph.output_node()
    for tangent in [n for n in module.graph.nodes if n.op == "placeholder"]:
        if not _updated_parameter(tangent):
            continue
        for user in list(tangent.users):
            others = [a for a in user.args if a is not tangent]
            if user.target is torch.ops.aten.add.Tensor and not user.kwargs and len(others) == 1:
                user.replace_all_uses_with(others[0])
                module.graph.erase_node(user)
        output.args = pytree.tree_map(
            lambda result, t=tangent: None if result is t else result, output.args
        )


def of_the_loss(tangents: Iterable[Node]) -> tuple[Node, ...]:
    """The tangents of a whole step without those of updated parameters that nothing reads."""
    return tuple(t for t in tangents if t.users or not _updated_parameter(t))


def unit_tangents(tangents: Iterable[Node], loss: torch.Tensor) -> list[torch.Tensor]:
    """Where the backward of a whole step begins: the loss's gradient is 1, that of values which
    the forward has given to parameters and inputs is 0."""
    return [
        torch.zeros_like(loss).expand(tuple(tangent.meta["val"].shape))
        if hasattr(getattr(tangent.meta.get("desc"), "output", None), "mutated_input")
        else torch.ones_like(loss)
        for tangent in tangents
    ]
