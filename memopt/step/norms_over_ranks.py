"""Norms of gradients that ranks hold shards of, as torch computes them of DTensors.

torch decides from the placements what is sent: for `clip_grad_norm_` the norms of the shards are
stacked, and then summed over the ranks as powers. It is traced here, over the norms of the present
rank's shards, so that a step has the same operators and collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.step.graph_extension import Extension
from memopt.step.shards import like_part
from memopt.torch_private.access import private
from memopt.torch_private.distributed import nothing_tried_out
from memopt.torch_private.operators import aten as _aten
from memopt.torch_private.tensors import spec_of


def norm_over_ranks(
    extension: Extension,
    norms: Sequence[Node],
    gradients: Sequence[Node],
    parameters: Sequence[torch.Tensor],
    norm_type: float,
) -> Node:
    """Add the norm of the norms of gradients.

    Args:
        extension: the step.
        norms: of the present rank's parts of the gradients.
        gradients: these parts.
        parameters: DTensors, placed as the gradients are.
        norm_type: as of `torch.nn.utils.clip_grad_norm_`.
    """
    pairs = zip(parameters, gradients, strict=True)
    whole = [like_part(parameter, gradient.meta["val"]) for parameter, gradient in pairs]
    parts = [_aten._foreach_norm.Scalar([one], float(norm_type))[0] for one in whole]

    def norm(*given: torch.Tensor) -> torch.Tensor:
        own = [like_part(part, value) for part, value in zip(parts, given, strict=True)]
        found: Any = torch.linalg.vector_norm(torch.stack(own), norm_type)
        return _whole(found)

    return _traced(extension, norm, norms)


def finite_over_ranks(extension: Extension, largest: Node, parameter: torch.Tensor) -> Node:
    """Add a number that is finite if the largest magnitudes of all ranks are.

    Args:
        extension: the step.
        largest: the largest magnitude among the present rank's gradients.
        parameter: a DTensor of these ranks.
    """
    from torch.distributed.tensor import DTensor, Partial

    mesh = spec_of(parameter).mesh
    # A maximum over the ranks may lose a NaN; a sum of zeros and NaN does not.
    zero = extension.call(_aten.mul.Tensor, largest, 0.0)

    def found(value: torch.Tensor) -> torch.Tensor:
        return _whole(DTensor.from_local(value, mesh, [Partial()] * mesh.ndim, run_check=False))

    return _traced(extension, found, [zero])


def _whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor()
    return found


def _traced(
    extension: Extension, function: Callable[..., torch.Tensor], arguments: Sequence[Node]
) -> Node:
    """Add the calls of a function of tensors; return its result."""
    values = [node.meta["val"] for node in arguments]
    make_fx = private("torch.fx.experimental.proxy_tensor.make_fx")
    with values[0].fake_mode, torch.no_grad(), nothing_tried_out():
        traced: GraphModule = make_fx(function)(*values)
    made: dict[Node, Node] = {}
    given = iter(arguments)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            made[node] = next(given)
        elif node.op == "call_function":
            made[node] = extension.call(node.target, *map_arg(node.args, made.__getitem__))
    (result,) = traced.graph.output_node().all_input_nodes
    return made[result]
