"""Makes a whole step over several micro-batches: forward and backward of each in turn. Their
gradients are added up, as autograd adds to `.grad`.

The graph has every operator once for each micro-batch. Its loss boundary is the first
micro-batch's; everything afterwards counts as backward. A buffer that the forward changes is read
by the next micro-batch with its new value. Each micro-batch has inputs of its own; the loss's
gradient, one divided by their number, is the same for all. What averages gradients over ranks may
run once, for the sums of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.models.device import in_blocks
from memopt.models.graph import Phase, TensorKind
from memopt.step.build import Lowering
from memopt.step.captured import Captured, Primal
from memopt.step.graph_extension import Extension, in_new_storages
from memopt.step.inputs import Call
from memopt.step.results import held_by
from memopt.torch_private.tensors import storage_key

_ADD = torch.ops.aten.add.Tensor


def joined_call(calls: Sequence[Call]) -> Call:
    """Join the calls of all micro-batches into one, whose leaves are theirs in turn."""
    return Call(tuple((one.args, one.kwargs) for one in calls), {})


class _Copies:
    """A later micro-batch: maps nodes and tensors of the first micro-batch to its own."""

    def __init__(self, extension: Extension, number: int) -> None:
        self.extension = extension
        self.number = number
        self.nodes: dict[Node, Node] = {}
        self.tensors: dict[int, int] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def node(self, one: Any) -> Any:
        """Return the node that replaces one of the first micro-batch's."""
        return map_arg(one, lambda n: self.nodes.get(n, n))

    def take_over(self, given: Sequence[Node], values: Sequence[Node]) -> None:
        """Map buffers to their values after the previous micro-batch."""
        for node, value in zip(given, values, strict=True):
            self.nodes[node] = value
            (tensor,), (held,) = self.extension.storages[node], self.extension.storages[value]
            if tensor is not None and held is not None:
                self.tensors[tensor] = held

    def primal(self, one: Primal, leaves: int) -> Primal:
        """Add an input of the micro-batch's own."""
        extension, fx_graph = self.extension, self.extension.fx_graph
        last = fx_graph.find_nodes(op="placeholder")[-1]
        with fx_graph.inserting_after(last):
            node = fx_graph.placeholder(f"{one.node.name}_{self.number}")
        node.meta = {
            **one.node.meta,
            "val": in_new_storages(one.node.meta.get("val"), self._memory),
        }
        self.nodes[one.node] = node
        (tensor,) = extension.storages[one.node]
        if tensor is not None and tensor not in self.tensors:
            name = f"{extension.tensors[tensor].name}.{self.number}"
            self.tensors[tensor] = extension.add_tensor(
                name, node.meta["val"], extension.tensors[tensor].kind
            )
            extension.bases[self.tensors[tensor]] = node
        extension.storages[node] = (None if tensor is None else self.tensors[tensor],)
        assert one.index is not None
        name = f"{one.name} of micro-batch {self.number + 1}"
        return replace(one, node=node, name=name, index=one.index + self.number * leaves)

    def run(self, calls: Sequence[Node], lowering: Lowering) -> None:
        """Repeat these calls of the first micro-batch, after all operators so far."""
        for one in calls:
            self._call(one, lowering)
        self._operators(calls, lowering)

    def _call(self, one: Node, lowering: Lowering) -> None:
        """Repeat a call of the first micro-batch, a view or a kernel call."""
        extension, fx_graph = self.extension, self.extension.fx_graph
        with fx_graph.inserting_before(fx_graph.output_node()):
            node = fx_graph.node_copy(one, self.node)
        node.meta["val"] = in_new_storages(one.meta.get("val"), self._memory)
        self.nodes[one] = node
        held = lowering.storages[one]
        for tensor in held:
            if tensor in lowering.graph.producer and tensor not in self.tensors:
                old = extension.tensors[tensor]
                name = node.name + old.name.removeprefix(one.name)
                kind = TensorKind.ACTIVATION if old.kind is TensorKind.OUTPUT else old.kind
                extension.tensors.append(replace(old, name=name, kind=kind))
                self.tensors[tensor] = len(extension.tensors) - 1
        extension.storages[node] = tuple(
            None if t is None else self.tensors.get(t, t) for t in held
        )
        if one in lowering.views:
            extension.views.add(node)
        for tensor in held:
            if tensor in self.tensors and lowering.bases.get(tensor) is one:
                extension.bases[self.tensors[tensor]] = node

    def _operators(self, calls: Sequence[Node], lowering: Lowering) -> None:
        begin, repeated = self.extension.length, set(calls)
        pairs = zip(lowering.graph.operators, lowering.nodes, strict=True)
        for position, (one, old) in enumerate(pairs):
            if old not in repeated:
                continue
            node = self.nodes[old]
            made = replace(
                one,
                name=node.name,
                reads=held_by(node.all_input_nodes, self.extension.storages),
                writes=tuple(self.tensors[t] for t in one.writes),
                in_place=tuple(self.tensors[t] for t in one.in_place),
                phase=Phase.BACKWARD,
            )
            self.extension.add_operator(made, node, begin + position)


def repeated(
    captured: Captured,
    lowering: Lowering,
    count: int,
    block_bytes: int,
    once: tuple[Node, ...] = (),
) -> tuple[Captured, Lowering]:
    """Repeat a captured whole step, before its updates, over several micro-batches.

    Args:
        captured, lowering: forward, loss and backward of one micro-batch.
        count: the number of micro-batches.
        block_bytes: the allocator's granularity.
        once: the calls that run once, for the sums of what all micro-batches give them.

    Returns:
        The step; its `other_results` are the losses of the later micro-batches and the buffers'
        final values, in the order of `captured.mutated`.

    Raises:
        ValueError: the forward changes an input in place.
    """
    changed = [captured.primals[i] for i in captured.mutated]
    if any(one.kind == "input" for one in changed):
        raise ValueError(
            "micro_batches= cannot plan a forward that changes an input in place, as this one: "
            "let it change a copy (clone())"
        )
    assert not lowering.alternatives
    extension = Extension(captured, lowering, block_bytes)
    *values, loss = captured.forward_outputs
    late = set(once)
    nodes = [n for n in extension.fx_graph.nodes if n in lowering.storages and n not in late]
    calls = [n for n in nodes if n.op == "call_function"]
    given = {n: n for one in once for n in one.all_input_nodes if n not in late}
    losses: list[Any] = []
    primals, sums = list(captured.primals), list(captured.gradients)
    of_inputs: list[Any] = []

    def added(before: Any, made: Any, gradient: Node) -> Node:
        (tensor,) = lowering.storages[gradient]
        producer = lowering.graph.producer.get(-1 if tensor is None else tensor)
        module = "" if producer is None else lowering.graph.operators[producer].module
        return extension.call(_ADD, before, made, module=module, over=before)

    for number in range(1, count):
        copies = _Copies(extension, number)
        copies.take_over([one.node for one in changed], values)
        for primal in captured.primals:
            if primal.kind == "input":
                primals.append(copies.primal(primal, len(captured.call.leaves)))
        copies.run(calls, lowering)
        losses.append(copies.node(loss))
        values = [copies.node(one) for one in captured.forward_outputs[:-1]]
        for position, gradient in enumerate(captured.gradients):
            made = copies.node(gradient)
            if captured.primals[position].kind == "input":
                of_inputs.append(made)
            elif isinstance(gradient, Node) and gradient not in late:
                sums[position] = added(sums[position], made, gradient)
        given = {one: added(so_far, copies.node(one), one) for one, so_far in given.items()}
    extension.postpone(once, given)
    joined = replace(
        captured,
        primals=tuple(primals),
        gradients=(*sums, *of_inputs),
        forward_outputs=(loss,),
        mutated=(),
        other_results=(*losses, *values),
        call=joined_call([captured.call] * count),
    )
    kept = held_by((*joined.gradients, *joined.other_results), extension.storages)
    more_bytes = (count - 1) * _unread_bytes(captured, block_bytes)
    outputs = held_by([loss], lowering.storages)
    return joined, extension.finish(kept, more_bytes=more_bytes, outputs=outputs)


def _unread_bytes(captured: Captured, block_bytes: int) -> int:
    """Return the bytes of the inputs that a step never reads."""
    read = {one.index for one in captured.primals}
    tensors = [
        leaf.untyped_storage()
        for position, leaf in enumerate(captured.call.leaves)
        if isinstance(leaf, torch.Tensor) and position not in read
    ]
    sizes = {int(storage_key(one)): one.nbytes() for one in tensors}
    return sum(in_blocks(size, block_bytes) for size in sizes.values())
