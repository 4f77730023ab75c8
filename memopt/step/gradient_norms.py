"""Clips by the global norm, and unscales for a GradScaler, in a whole step: norms first, then
scaled updates.

`torch.nn.utils.clip_grad_norm_` and `GradScaler.unscale_` treat all gradients together. Here the
same kernels run in the same order, one gradient at a time: each gradient's norm as soon as the
gradient exists, the norm of the norms when all exist, and each scaling just before the update, over
the gradient itself if nothing else needs it. A list of one tensor takes the same kernel as torch's
list of all (`torch._foreach_norm`), which treats each tensor on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.models.device import in_blocks
from memopt.models.graph import TensorKind
from memopt.models.step_rules import StepRules
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.graph_extension import Extension
from memopt.step.results import held_by
from memopt.step.shards import any_shards, like_part
from memopt.torch_private.access import private
from memopt.torch_private.distributed import nothing_tried_out
from memopt.torch_private.modules import grouped_by_dtype
from memopt.torch_private.operators import aten as _aten
from memopt.torch_private.tensors import spec_of


def with_norms(
    captured: Captured,
    lowering: Lowering,
    positions: Sequence[int],
    parameters: Sequence[torch.Tensor],
    rules: StepRules,
    block_bytes: int,
) -> tuple[Captured, Lowering, Node | None]:
    """Add the unscaling and clipping of gradients to a step.

    Returns:
        The step, its gradients replaced; and, if they are scaled, the node of the largest magnitude
        among all their elements, which is finite if all are. If they are clipped, the last of the
        step's `other_results` is their norm; if scaled, the last of its tangents is the inverse of
        the scale.
    """
    extension = Extension(captured, lowering, block_bytes)
    gradients, others, largest = list(captured.gradients), captured.other_results, None
    made: list[Node] = [gradients[i] for i in positions]
    tangents = captured.tangents
    if rules.scaled:
        tangents = (*tangents, _inverse_scale(extension))
        made, largest = _unscaled(extension, made, tangents[-1], parameters)
    if rules.clip_norm is not None:
        made, norm = _clipped(extension, made, parameters, rules.clip_norm, rules.norm_type)
        others = (*others, norm)
    for position, gradient in zip(positions, made, strict=True):
        gradients[position] = gradient
    captured = replace(
        captured, gradients=tuple(gradients), other_results=others, tangents=tangents
    )
    kept = held_by((*gradients, *others), extension.storages)
    given = held_by(tangents, extension.storages)
    # A scaler holds its scale, and a count of steps.
    more_bytes = 2 * in_blocks(4, block_bytes) if rules.scaled else 0
    lowering = extension.finish(kept, more_bytes=more_bytes, tangents=given)
    return captured, lowering, largest


def _inverse_scale(extension: Extension) -> Node:
    """Add the factor that gradients are multiplied by, an input given with the loss's gradient."""
    like = extension.captured.tangents[-1]
    with extension.fx_graph.inserting_after(like):
        node = extension.fx_graph.placeholder("inverse_scale")
    value = like.meta["val"].new_empty((), dtype=torch.float32)
    node.meta["val"] = value
    index = extension.add_tensor(node.name, value, TensorKind.GRADIENT)
    extension.storages[node], extension.bases[index] = (index,), node
    return node


def _unscaled(
    extension: Extension,
    gradients: list[Node],
    inverse: Node,
    parameters: Sequence[torch.Tensor],
) -> tuple[list[Node], Node]:
    """Add `GradScaler.unscale_`; return the gradients unscaled, and their largest magnitude before,
    or over several ranks a number that is finite if it is. The check for infinities and NaN looks
    at that magnitude, which needs no memory."""
    found, made = [], []
    for gradient in gradients:
        if gradient.meta["val"].numel():
            found.append(extension.call(_aten.linalg_vector_norm.default, gradient, math.inf))
        call = extension.call
        made.append(call(_aten.mul.Tensor, gradient, inverse, over=gradient, before=found[-1:]))
    largest = _norm_of(extension, found, math.inf)
    if any_shards(parameters):
        largest = finite_over_ranks(extension, largest, parameters[0])
    return made, largest


def _clipped(
    extension: Extension,
    gradients: list[Node],
    parameters: Sequence[torch.Tensor],
    most: float,
    norm_type: float,
) -> tuple[list[Node], Node]:
    """Add `torch.nn.utils.clip_grad_norm_`; return the scaled gradients, and their norm before."""
    groups = grouped_by_dtype([one.meta["val"] for one in gradients])
    calls = [
        extension.call(_aten._foreach_norm.Scalar, [gradient], float(norm_type))
        for gradient in gradients
    ]
    norms = [extension.item(one, 0) for one in calls]
    order = [i for group in groups for i in group]
    listed = [norms[i] for i in order]
    if any_shards(parameters):
        placed = [parameters[i] for i in order]
        parts = [gradients[i] for i in order]
        total = norm_over_ranks(extension, listed, parts, placed, norm_type)
    else:
        total = _norm_of(extension, listed, norm_type)
    # clip_grad_norm_'s own arithmetic: most / (total + 1e-6), at most 1.
    room = extension.call(_aten.add.Tensor, total, 1e-6)
    inverse = extension.call(_aten.reciprocal.default, room)
    share = extension.call(_aten.mul.Tensor, inverse, float(most))
    share = extension.call(_aten.clamp.default, share, None, 1.0)
    made = [
        extension.call(_aten.mul.Tensor, gradient, share, over=gradient, before=[one])
        for gradient, one in zip(gradients, calls, strict=True)
    ]
    return made, total


def _norm_of(extension: Extension, norms: list[Node], norm_type: float) -> Node:
    stacked = extension.call(_aten.stack.default, norms)
    return extension.call(_aten.linalg_vector_norm.default, stacked, float(norm_type))


def norm_over_ranks(
    extension: Extension,
    norms: Sequence[Node],
    gradients: Sequence[Node],
    parameters: Sequence[torch.Tensor],
    norm_type: float,
) -> Node:
    """Add the norm of the norms of gradients that ranks hold shards of, as torch computes it.

    torch decides from the placements what is sent: the norms of the shards are stacked, and summed
    over the ranks as powers. It is traced here, over the norms of the present rank's shards, so
    that a step has the same operators and collectives in the same order."""
    pairs = zip(parameters, gradients, strict=True)
    whole = [like_part(parameter, gradient.meta["val"]) for parameter, gradient in pairs]
    parts = [_aten._foreach_norm.Scalar([one], float(norm_type))[0] for one in whole]

    def norm(*given: torch.Tensor) -> torch.Tensor:
        own = [like_part(part, value) for part, value in zip(parts, given, strict=True)]
        found: Any = torch.linalg.vector_norm(torch.stack(own), norm_type)
        return _whole(found)

    return _traced(extension, norm, norms)


def finite_over_ranks(extension: Extension, largest: Node, parameter: torch.Tensor) -> Node:
    """Add a number that is finite if the largest magnitudes of all ranks are."""
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
