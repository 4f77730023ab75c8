"""Traces a model's outputs so that each has a gradient of its own.

AOTAutograd makes outputs that are views again after the step, from their bases, and their gradients
meet outside of the backward, where no plan sees them. It copies the gradient of a view into the
view's own memory layout, gaps included, which loses all but one part of the gradient if the view
overlaps itself (`unfold`). So a copy of each output is traced in its place: its gradient is a
tensor without gaps, and the sum of several views' gradients is in the graph, in eager's order.
After tracing the copies are removed: the step returns the views themselves.

An output that the user's loss does not use is traced, and returned, without a gradient: a Hugging
Face model given `labels` returns its loss and its logits, and autograd would carry a zero gradient
as large as the logits through the backward. It still looks like eager's, and refuses a gradient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memopt.errors import CaptureError
from memopt.models.record import ANY_LOSS, OutputGradients
from memopt.step.assumed import assumptions_of, values_of
from memopt.step.dropped_outputs import without
from memopt.step.inner_outputs import inner_outputs
from memopt.step.input_values import NUMBERS
from memopt.step.inputs import Orders
from memopt.step.memory_layout import in_order, is_dense, storage_of
from memopt.step.nodes import all_nodes, has_checkpoints, is_reentrant_checkpoint
from memopt.torch_private import pytree
from memopt.torch_private.aot import descriptor_types
from memopt.torch_private.tensors import version_of

_COPIED: dict[Any, int] = {torch.ops.aten.clone.default: 0, torch.ops.aten.copy.default: 1}
"""Operators that make a copy, and the position of the argument that they copy."""
RETURNS_DTENSOR = (
    "the model returns a DTensor; return its local tensor (to_local()), or all of it "
    "(full_tensor()); under loss_parallel compute the loss in the model, and return its "
    "full_tensor()"
)


@dataclass(frozen=True)
class TracedOutputs:
    """How the leaves of a model's output were traced. Numbers are positions among the leaves.

    Attributes:
        count: the number of leaves.
        values: the (fake) outputs as eager makes them, and other leaves; only until the joint graph
            is traced.
        copied: outputs in whose places copies are traced.
        repeated: (position, earlier position) of outputs that are the same tensor; only the earlier
            one is traced.
        beside: (position, bytes) of gradients that autograd takes past the planned backward: of
            differentiable inputs and parameters that are outputs themselves, and of views of an
            input that the model updates in place; (`count`, bytes) of memory that it holds besides
            all gradients.
        given: outputs that are an unchanged input or parameter: returned as such.
        shared: differentiable outputs that share elements with another one or with an input: a
            change in place of one would go unnoticed by autograd for the other.
        inner: differentiable outputs from which others are computed → those.
        numbers: outputs in whose places the model returns a number.
        gradients: the facts known of the loss when they were traced.
        makes_zeros: whether the forward calls functions of several results, for whose missing
            gradients autograd makes zeros: custom functions, and reentrant checkpoints.
        recomputes: whether parts of the forward are checkpoints, which eager recomputes.
        reentrant: whether one of these is reentrant.
    """

    count: int = 0
    values: tuple[Any, ...] = ()
    copied: tuple[int, ...] = ()
    repeated: tuple[tuple[int, int], ...] = ()
    beside: tuple[tuple[int, int], ...] = ()
    given: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    inner: Mapping[int, frozenset[int]] = field(default_factory=dict)
    numbers: frozenset[int] = frozenset()
    gradients: OutputGradients = ANY_LOSS
    makes_zeros: bool = False
    recomputes: bool = False
    reentrant: bool = False


NO_OUTPUTS = TracedOutputs()


def separate_outputs(
    traced: GraphModule, gradients: OutputGradients, orders: Orders = ()
) -> TracedOutputs:
    """Replace the outputs of a dynamo graph by copies, each with a gradient of its own, in place.

    Args:
        traced: dynamo's graph.
        gradients: how the user's loss uses the outputs. Unused ones are traced without a gradient,
            or not returned at all; the others' gradients get the layout in which the loss gives
            them.
        orders: dimension orders of output gradients that arrive in other layouts, see `Call`.

    Raises:
        CaptureError: the model does not return the same outputs each time it is called.
    """
    output: Any = traced.graph.output_node()
    leaves = list(output.args[0])
    used = (i for i, _ in gradients.strides)
    last = max((*gradients.unused, *gradients.dropped, *used), default=-1)
    if last >= len(leaves):
        raise CaptureError(
            f"the model returned {len(leaves)} values when it was captured and at least "
            f"{last + 1} when its loss was measured; memopt needs the same in every step"
        )
    inputs = [_value(n) for n in traced.graph.nodes if n.op in ("placeholder", "get_attr")]
    values = [None if i in gradients.dropped else _value(leaf) for i, leaf in enumerate(leaves)]
    if orders:
        gradients = _laid_out(gradients, orders, values)
    outputs = _outputs(values, inputs, gradients)
    strides = dict(gradients.strides)
    earlier = dict(outputs.repeated)
    inner = inner_outputs(leaves[: len(leaves) - values_of(assumptions_of(traced))])
    with traced.graph.inserting_before(output):
        for position, leaf in enumerate(leaves):
            if position in earlier or position in gradients.dropped:
                # Not None: some outputs drop a None together with its name.
                leaves[position] = 0
                continue
            if position in gradients.unused and position not in outputs.given:
                leaf = traced.graph.call_method("detach", (leaf,))
            if position in outputs.copied:
                leaf = _copy(traced, leaf, outputs.values[position], strides.get(position))
            leaves[position] = leaf
    output.args = (tuple(leaves),)
    traced.recompile()
    return replace(
        outputs,
        inner=inner,
        numbers=traced.meta.get(NUMBERS, frozenset()),
        makes_zeros=_makes_zeros(traced),
        recomputes=has_checkpoints(traced),
        reentrant=any(map(is_reentrant_checkpoint, all_nodes(traced))),
    )


def _laid_out(gradients: OutputGradients, orders: Orders, values: list[Any]) -> OutputGradients:
    """Add to the facts known of a loss that gradients arrive in these orders."""
    known = dict(gradients.strides)
    for position, order in orders:
        value = values[position] if position < len(values) else None
        if isinstance(value, torch.Tensor) and value.dim() == len(order):
            known[position] = in_order(value.shape, order)
    return replace(gradients, strides=tuple(sorted(known.items())))


def _makes_zeros(traced: GraphModule) -> bool:
    """Return what `TracedOutputs.makes_zeros` is for a dynamo graph."""
    for node in all_nodes(traced):
        results = node.meta.get("example_value")
        several = isinstance(results, (tuple, list)) and len(results) > 1
        custom = several and str(node.target) == "autograd_function_apply"
        if custom or is_reentrant_checkpoint(node):
            return True
    return False


def _copy(
    traced: GraphModule, leaf: Node, value: torch.Tensor, strides: tuple[int, ...] | None
) -> Node:
    """Add a copy of an output, in the memory layout of its gradient."""
    graph = traced.graph
    # A fake output may have other strides than the real one, so known strides are always given.
    if strides is None or len(strides) != value.dim() or not is_dense(value.shape, strides):
        return graph.call_function(torch.clone, (leaf,))
    empty = graph.call_method("new_empty_strided", (leaf, tuple(value.shape), strides))
    return graph.call_method("copy_", (empty, leaf))


def tangent_of(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return an output's gradient as the planned backward gets it: as it is, or without gaps."""
    if is_dense(gradient.shape, gradient.stride()):
        return gradient
    strides = dense_strides(value)
    made = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    )
    return made.copy_(gradient)


def gradients_of(
    ranks: list[int | None], arrived: dict[int, torch.Tensor], held_bytes: int = 0
) -> OutputGradients:
    """Return which leaves of an output get gradients from a loss, and in which layouts."""
    unused, strides = [], []
    for position, rank in enumerate(ranks):
        gradient = None if rank is None else arrived.get(rank)
        if gradient is None:
            unused += [position] * (rank is not None)
        # Recorded even if they equal the output's strides: a fake output may have others.
        elif is_dense(gradient.shape, gradient.stride()):
            strides.append((position, tuple(gradient.stride())))
    return OutputGradients(tuple(unused), tuple(strides), held_bytes)


def in_memory_of_its_own(tangent: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it would keep more memory alive than its own: a part of the
    gradient of several outputs' concatenation, say."""
    if tangent.untyped_storage().nbytes() <= tangent.nbytes:
        return tangent
    return tangent.clone()


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, Node):
        return leaf
    return leaf.meta.get("example_value", leaf.meta.get("val"))


def _outputs(values: list[Any], inputs: list[Any], gradients: OutputGradients) -> TracedOutputs:
    given_storages: dict[int, torch.Tensor] = {}
    for value in inputs:
        if isinstance(value, torch.Tensor):
            given_storages.setdefault(storage_of(value), value)
    first: dict[int, int] = {}
    repeated, beside, copied = [], [], []
    members: defaultdict[int, list[int]] = defaultdict(list)
    given, shared = set(), set()
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if id(value) in first:
            repeated.append((position, first[id(value)]))
            continue
        first[id(value)] = position
        storage = storage_of(value)
        differentiable = value.requires_grad and position not in gradients.unused
        source = given_storages.get(storage)
        if source is not None:
            own = any(value is one for one in inputs)
            # AOTAutograd makes outputs without a gradient, and outputs that are updated in place,
            # again as views of the input itself.
            if own and not version_of(source):
                given.add(position)
            if own or version_of(source) or not differentiable:
                if differentiable and not (own and version_of(source)):
                    view = 0 if own else 2 * source.untyped_storage().nbytes()
                    beside.append((position, value.nbytes + view))
                continue
            shared.add(position)
        copied.append(position)
        if differentiable:
            members[storage].append(position)
    for group in members.values():
        for i, one in enumerate(group):
            for other in group[:i]:
                if not _are_disjoint(values[one], values[other]):
                    shared.update((one, other))
    if gradients.held_bytes:
        beside.append((len(values), gradients.held_bytes))
    return TracedOutputs(
        count=len(values),
        values=tuple(values),
        copied=tuple(copied),
        repeated=tuple(repeated),
        beside=tuple(beside),
        given=frozenset(given),
        shared=frozenset(shared),
        gradients=gradients,
    )


def _are_disjoint(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two views of one storage are known to have no element in common: two boxes of
    the same grid, such as slices of one tensor."""
    if 0 in (one.numel(), other.numel()):
        return True
    if one.dtype is not other.dtype:
        return False
    if one.stride() != other.stride():
        ends = [v.storage_offset() + _extent(v) for v in (one, other)]
        return ends[0] <= other.storage_offset() or ends[1] <= one.storage_offset()
    dimensions = sorted(
        zip(one.stride(), one.shape, other.shape, strict=True), key=lambda d: d[0], reverse=True
    )
    begins = [one.storage_offset(), other.storage_offset()]
    found, room = False, None
    for stride, *sizes in dimensions:
        if stride == 0:
            continue
        at = [begin // stride for begin in begins]
        begins = [begin % stride for begin in begins]
        ends = [a + size for a, size in zip(at, sizes, strict=True)]
        if room is not None and max(ends) * stride > room:
            return False
        room = stride
        found = found or ends[0] <= at[1] or ends[1] <= at[0]
    return found or begins[0] != begins[1]


def _extent(value: torch.Tensor) -> int:
    pairs = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def hand_out(module: GraphModule, outputs: TracedOutputs) -> None:
    """Make a joint graph return its outputs themselves instead of their copies, in place.

    Raises:
        CaptureError: outputs that share memory would no longer share it.
    """
    output: Any = module.graph.output_node()
    results = list(output.args[0])
    plain = descriptor_types().PlainAOTOutput
    place = {d.idx: i for i, d in enumerate(output.meta["desc"]) if isinstance(d, plain)}
    copies = []
    for position in outputs.copied:
        if position not in place:
            raise CaptureError(RETURNS_DTENSOR)
        copy = results[place[position]]
        if not isinstance(copy, Node) or copy.target not in _COPIED:
            raise CaptureError(
                f"output {position} of the model is traced as {copy}, which memopt does not know; "
                "please report this model"
            )
        copies.append(copy)
        results[place[position]] = copy.args[_COPIED[copy.target]]
    storages: dict[int, int] = {}
    for position in outputs.copied:
        found = storage_of(results[place[position]].meta["val"])
        if storages.setdefault(storage_of(outputs.values[position]), found) != found:
            raise CaptureError(
                f"output {position} of the model shares memory with another one, which the traced "
                "model cannot do; return clone() of it"
            )
    output.args = (type(output.args[0])(results),)
    for copy in copies:
        module.graph.erase_node(copy)
        for empty in copy.all_input_nodes:
            if not empty.users and empty.target is torch.ops.aten.new_empty_strided.default:
                module.graph.erase_node(empty)


def dense_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides with which an output's gradient is traced: the output's own or, if it has
    gaps, those of the same order of dimensions without gaps."""
    return tuple(torch.empty_like(value, device="meta").stride())


def handed_out(value: Any, shared: bool) -> Any:
    """Return the tensor that the user gets for a forward output: the same memory, whose changes in
    place are counted for both. An output that shares elements with others is a view, which autograd
    refuses to change in place, since the others would not notice."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ops.aten.alias.default(value) if shared else value.detach()


def as_users_see(output: Any, outputs: TracedOutputs) -> Any:
    """Return a traced model's output with numbers and repeated tensors in their places, stand-ins
    for outputs that are not returned, and an autograd node for each output."""
    output = without(output, outputs.gradients.dropped)
    if not (outputs.repeated or outputs.numbers) and len(outputs.copied) < 2:
        return output
    leaves, spec = pytree.tree_flatten(output)
    nodes = Counter(leaves[position].grad_fn for position in outputs.copied)
    for position in outputs.copied:
        node = leaves[position].grad_fn
        if node is not None and nodes[node] > 1:
            is_view = position in outputs.shared
            leaves[position] = _OwnNode.apply(leaves[position], is_view)  # type: ignore[no-untyped-call]
    for position, earlier in outputs.repeated:
        leaves[position] = leaves[earlier]
    for position in outputs.numbers:
        leaves[position] = leaves[position].item()
    return pytree.tree_unflatten(leaves, spec)


class _OwnNode(torch.autograd.Function):
    """Gives an output an autograd node of its own. A node that several outputs share would call the
    hooks of all of them, with None for those that the loss does not use."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, is_view: bool) -> torch.Tensor:
        context.set_materialize_grads(False)
        # What is a view stays one: autograd refuses to change it in place.
        return torch.ops.aten.alias.default(value) if is_view else value.detach()

    @staticmethod
    def backward(_context: Any, gradient: Any) -> Any:
        return gradient, None
