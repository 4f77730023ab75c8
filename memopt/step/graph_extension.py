"""Adds calls to a captured step: nodes, with their tensors and operators."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.models.device import in_blocks
from memopt.models.graph import Operator, Phase, Tensor, TensorKind
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.collectives import collective_of, is_wait
from memopt.step.in_place import overwritable, same_bits_in_place
from memopt.step.memory_layout import storage_of
from memopt.step.results import held_by
from memopt.step.signature import values_of


class Extension:
    """A step that grows by calls, each of which runs as soon as its arguments exist."""

    def __init__(self, captured: Captured, lowering: Lowering, block_bytes: int) -> None:
        self.captured = captured
        self.lowering = lowering
        self.fx_graph = captured.module.graph
        self.block_bytes = block_bytes
        graph = lowering.graph
        self.tensors = list(graph.tensors)
        self.storages = dict(lowering.storages)
        self.views = set(lowering.views)
        self.bases = dict(lowering.bases)
        self._rows: list[tuple[int, int, Operator, Node]] = []
        """(position, its number, operator, its node)"""
        self._numbers = itertools.count()
        self._made_at: dict[int, int] = {}
        self._over: dict[Node, tuple[Node | None, frozenset[Node]]] = {}
        for position, (one, node) in enumerate(zip(graph.operators, lowering.nodes, strict=True)):
            self.add_operator(one, node, position)
        self.first_backward = graph.first_backward

    @property
    def length(self) -> int:
        """Return the position after all operators."""
        return 1 + max((row[0] for row in self._rows), default=-1)

    def add_tensor(self, name: str, value: torch.Tensor, kind: TensorKind) -> int:
        """Add a tensor with a storage of its own; return its index."""
        size_bytes = in_blocks(value.untyped_storage().nbytes(), self.block_bytes)
        self.tensors.append(Tensor(name, size_bytes, kind))
        return len(self.tensors) - 1

    def add_operator(self, one: Operator, node: Node, position: int) -> None:
        """Add an operator at a position, after those added there before."""
        self._rows.append((position, next(self._numbers), one, node))
        self._made_at.update(dict.fromkeys(one.writes, position))

    def call(
        self,
        target: Any,
        *args: Any,
        module: str = "",
        over: Node | None = None,
        before: Iterable[Node] = (),
    ) -> Node:
        """Add a call of a functional ATen operator, or a collective, to the backward part.

        Args:
            target, args: the call.
            module: the user's module that it belongs to.
            over: an argument that the call may overwrite if nothing but `before` also reads it.
            before: calls that were added earlier.
        """
        with self.fx_graph.inserting_before(self.fx_graph.output_node()):
            node = self.fx_graph.call_function(target, args)
        given = map_arg(args, lambda one: one.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*given)
        source = _viewed(node)
        if source is not None:
            self.storages[node] = self.storages[source]
            self.views.add(node)
            return node
        held = []
        for place, value in enumerate(values_of(node)):
            several = isinstance(node.meta["val"], (tuple, list))
            name = f"{node.name}.{place}" if several else node.name
            held.append(self.add_tensor(name, value, TensorKind.GRADIENT))
            if not several:
                self.bases[held[-1]] = node
        self.storages[node] = tuple(held)
        reads = held_by(node.all_input_nodes, self.storages)
        begin = max((self._made_at.get(t, 0) for t in reads), default=0)
        made = Operator(
            name=node.name,
            reads=reads,
            writes=tuple(held),
            time_s=0.0,
            phase=Phase.BACKWARD,
            recomputable=False,
            module=module,
            target=str(target),
            collective=collective_of(node),
        )
        self.add_operator(made, node, max(begin, self.first_backward))
        self._over[node] = (over, frozenset(before))
        return node

    def postpone(self, nodes: Sequence[Node], instead: Mapping[Node, Node]) -> None:
        """Let calls of the step run after all calls so far, and read other nodes.

        Args:
            nodes: calls and views, in their order.
            instead: node that they read → the one that they are to read.
        """
        operators = {node: one for *_, one, node in self._rows}
        postponed = set(nodes)
        self._rows = [row for row in self._rows if row[3] not in postponed]
        output = self.fx_graph.output_node()
        for node in nodes:
            output.prepend(node)
            for before, after in instead.items():
                node.replace_input_with(before, after)
            if node in operators:
                one = operators[node]
                reads = held_by(node.all_input_nodes, self.storages)
                free = tuple(t for t in one.in_place if t in reads)
                position = max(self._made_at.get(t, 0) for t in reads)
                self.add_operator(replace(one, reads=reads, in_place=free), node, position)

    def item(self, node: Node, place: int) -> Node:
        """Add the item of a call that has several results."""
        with self.fx_graph.inserting_before(self.fx_graph.output_node()):
            found = self.fx_graph.call_function(operator.getitem, (node, place))
        found.meta["val"] = node.meta["val"][place]
        held = self.storages[node][place]
        assert held is not None
        self.storages[found] = (held,)
        self.views.add(found)
        self.bases[held] = found
        return found

    def finish(
        self,
        kept: Sequence[int],
        *,
        more_bytes: int = 0,
        outputs: Sequence[int] | None = None,
        tangents: Sequence[int] | None = None,
    ) -> Lowering:
        """Return the step with all additions.

        Args:
            kept: tensors that outlive the step, besides the graph's outputs; nothing may overwrite
                them.
            more_bytes: resident bytes that belong to no tensor.
            outputs, tangents: the graph's new ones; None: unchanged.
        """
        graph = self.lowering.graph
        outputs = graph.outputs if outputs is None else outputs
        tangents = graph.tangents if tangents is None else tangents
        rows = sorted(self._rows, key=lambda row: row[:2])
        fixed = {*kept, *outputs, *tangents}
        readers: dict[int, set[Node]] = {}
        for _, _, one, node in rows:
            for tensor in one.reads:
                readers.setdefault(tensor, set()).add(node)
        operators = [self._in_place(one, node, fixed, readers) for _, _, one, node in rows]
        grown = replace(
            graph,
            tensors=tuple(self.tensors),
            operators=tuple(operators),
            outputs=tuple(outputs),
            gradients=tuple(dict.fromkeys(kept)),
            tangents=tuple(tangents),
            written_back=tuple(t for t in graph.written_back if t in outputs and t not in kept),
            input_gradients=(),
            extra_resident_bytes=graph.extra_resident_bytes + more_bytes,
        )
        return replace(
            self.lowering,
            graph=grown,
            nodes=tuple(node for *_, node in rows),
            storages=self.storages,
            views=frozenset(self.views),
            bases=self.bases,
        )

    def _in_place(
        self, one: Operator, node: Node, fixed: set[int], readers: dict[int, set[Node]]
    ) -> Operator:
        """Return the operator, with the tensor that it may overwrite, if any."""
        over, before = self._over.get(node, (None, frozenset()))
        if over is None or over not in overwritable(node):
            return one
        (tensor,) = self.storages[over]
        if tensor is None or tensor in fixed or self.tensors[tensor].resident:
            return one
        device = self.lowering.device
        alone = readers[tensor] <= {node, *before}
        same = alone and (device is None or same_bits_in_place(node, over, device))
        return replace(one, in_place=(tensor,)) if same else one


def _viewed(node: Node) -> Node | None:
    """Return the argument that a call's result is a view of, or waits for; None: it is new."""
    value = node.meta["val"]
    if is_wait(node.target):
        return node.all_input_nodes[0]
    for one in node.all_input_nodes if isinstance(value, torch.Tensor) else ():
        given = one.meta["val"]
        if isinstance(given, torch.Tensor) and storage_of(given) == storage_of(value):
            return one
    return None


def in_new_storages(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Make a (fake) value that shares no memory with the given one.

    Args:
        value: a tensor, or a list or tuple of them; anything else stays as it is.
        made: storage → its new memory, extended here; values that share memory share it again.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(in_new_storages(one, made) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    name = storage_of(value)
    if name not in made:
        count = value.untyped_storage().nbytes()
        made[name] = value.new_empty((count,), dtype=torch.uint8)
    typed = made[name].view(value.dtype)
    found = typed.as_strided(value.size(), value.stride(), value.storage_offset())
    return found.conj() if value.is_conj() else found
