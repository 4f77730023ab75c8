"""Replaces regions of a captured step by single calls of compiled kernels."""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.kernels.compiled.divide import Region
from memopt.kernels.compiled.dropout import SEEDS
from memopt.models.graph import Phase
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.kernel import FusedKernel
from memopt.step.nodes import ANY_OFFSET, is_random
from memopt.step.region_graph import Subgraph

Compiled = tuple[Region, Subgraph, FusedKernel]
"""A region, the region as a graph of its own, and its kernel."""


KEPT_META = ("nn_module_stack", "seq_nr", "partitioner_tag", "stack_trace")
_NAMED = 3
"""Most operators that a fused one is named after."""


def with_kernels(captured: Captured, lowering: Lowering, fused: Sequence[Compiled]) -> Captured:
    """Replace regions by calls of their kernels, in the captured graph itself.

    The call of a region stands where its last operator stood.
    """
    graph = captured.module.graph
    _reorder(graph, lowering, fused)
    seeds = _seeds(graph, lowering, fused)
    renamed: dict[Node, Node] = {}
    for region, one, kernel in fused:
        last = lowering.nodes[region.operators[-1]]
        inputs: list[Node] = [renamed.get(node, node) for node in one.inputs]
        with graph.inserting_before(lowering.nodes[region.operators[0]]):
            call = graph.create_node("call_function", kernel, (), name=_name(lowering, region))
        with graph.inserting_before(call):
            inputs += [_seed(graph, seeds, node) for node in one.dropouts]
        call.args = tuple(inputs)
        call.meta = {key: last.meta[key] for key in KEPT_META if key in last.meta}
        call.meta["val"] = one.values
        for position, node in reversed(list(enumerate(one.outputs))):
            with graph.inserting_after(call):
                result = graph.call_function(operator.getitem, (call, position))
            result.meta = {**node.meta, "val": one.values[position]}
            if node in one.again:
                readers = _readers(lowering, fused, node)
                with graph.inserting_before(result.next):
                    _read_again(lowering, readers, node, renamed.get(node, node), result)
            else:
                renamed[node] = result
                node.replace_all_uses_with(result)
    _erase(graph, {lowering.nodes[op] for region, _, _ in fused for op in region.operators})
    return with_renamed(captured, renamed)


def with_renamed(captured: Captured, renamed: Mapping[Node, Node]) -> Captured:
    """Return a step in which other nodes take the place of some results."""

    def new(one: Any) -> Any:
        return renamed.get(one, one) if isinstance(one, Node) else one

    return replace(
        captured,
        forward_outputs=tuple(map(new, captured.forward_outputs)),
        gradients=tuple(map(new, captured.gradients)),
    )


def _readers(lowering: Lowering, fused: Sequence[Compiled], written: Node) -> list[Node]:
    """Return the calls outside of regions that read a node's tensor in the backward."""
    (tensor,) = lowering.storages[written]
    assert tensor is not None
    inside = {op for region, _, _ in fused for op in region.operators}
    graph = lowering.graph
    return [
        lowering.nodes[op]
        for op in graph.readers[tensor]
        if op not in inside and graph.operators[op].phase is Phase.BACKWARD
    ]


def _read_again(
    lowering: Lowering, readers: Sequence[Node], written: Node, base: Node, result: Node
) -> None:
    """Have calls read a recomputed tensor, through views of it like those that they read now.

    Args:
        lowering: of the step.
        readers: the calls.
        written: the node as it was in the step.
        base: the node in its place now.
        result: the recomputed node.
    """
    copies = {written: result, base: result}
    held = lowering.storages[written]

    def copy(node: Node) -> Node:
        if node not in copies and lowering.storages.get(node) == held:
            args, kwargs = map_arg((node.args, node.kwargs), copy)
            copies[node] = add_call(
                result.graph, result.meta["val"].fake_mode, node.target, *args, **kwargs
            )
            copies[node].meta |= {key: node.meta[key] for key in KEPT_META if key in node.meta}
        return copies.get(node, node)

    for reader in readers:
        for node in reader.all_input_nodes:
            reader.replace_input_with(node, copy(node))


def _name(lowering: Lowering, region: Region) -> str:
    names = dict.fromkeys(
        str(lowering.nodes[op].target).partition(".")[2].partition(".")[0].strip("_")
        for op in region.operators
    )
    return "fused_" + "_".join(list(names)[:_NAMED])


def _seeds(
    graph: FxGraph, lowering: Lowering, fused: Sequence[Compiled]
) -> dict[Node, tuple[Node, int]]:
    """Map each dropout to the call that draws the seeds of its step, and its place among them, in
    the order in which eager would draw."""
    inside = {node for _, one, _ in fused for node in one.dropouts}
    dropouts = [node for node in lowering.nodes if node in inside]
    if not dropouts:
        return {}
    value = dropouts[0].args[0].meta["val"]  # type: ignore[union-attr]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        seeds = add_call(graph, value.fake_mode, SEEDS, len(dropouts), value.device)
    return {node: (seeds, place) for place, node in enumerate(dropouts)}


def _seed(graph: FxGraph, seeds: dict[Node, tuple[Node, int]], dropout: Node) -> Node:
    """Return a dropout's seed. Its fake value does not depend on its place: equal regions are
    measured once, wherever their seeds are."""
    drawn, place = seeds[dropout]
    fake_mode = drawn.meta["val"].fake_mode
    seed = add_call(graph, fake_mode, torch.ops.aten.select.int, drawn, 0, 0)
    seed.args = (drawn, 0, place)
    seed.meta[ANY_OFFSET] = True
    return seed


def add_call(graph: FxGraph, fake_mode: Any, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call to a step's graph, with its fake value."""
    node = graph.call_function(target, args, kwargs)
    given, named = map_arg((args, kwargs), lambda one: one.meta["val"])
    with fake_mode:
        node.meta["val"] = target(*given, **named)
    return node


def _reorder(graph: FxGraph, lowering: Lowering, fused: Sequence[Compiled]) -> None:
    """Put the nodes of each region after all operands and before all readers of the region."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    unit = {node: i for i, node in enumerate(nodes)}
    for region, _, _ in fused:
        calls = [lowering.nodes[op] for op in region.operators]
        last = max(position[call] for call in calls)
        for call in calls:
            unit[call] = last
            for user in call.users:
                if user.target is operator.getitem:
                    unit[user] = last
        _join_views(calls, lowering, region, unit, last)
    members: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        members[unit[node]].append(node)
    needs = {
        one: {unit[s] for node in group for s in node.all_input_nodes} - {one}
        for one, group in members.items()
    }
    for region, part, _ in fused:
        one = unit[lowering.nodes[region.operators[0]]]
        needs[one] |= {unit[node] for node in part.inputs} - {one}
        for written in part.again:
            for call in _readers(lowering, fused, written):
                needs[unit[call]].add(one)
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    ready: list[int] = []
    order: list[Node] = []
    while sorter.is_active():
        for one in sorter.get_ready():
            heapq.heappush(ready, one)
        one = heapq.heappop(ready)
        order += members[one]
        sorter.done(one)
    end = graph.output_node()
    for node in order:
        if node is not end:
            end.prepend(node)


def _join_views(
    calls: Sequence[Node], lowering: Lowering, region: Region, unit: dict[Node, int], last: int
) -> None:
    """Add the views that lie between calls of a region to the region, in `unit`: they move with
    it."""
    written = {t for op in region.operators for t in lowering.graph.operators[op].writes}
    stack = [source for call in calls for source in call.all_input_nodes]
    while stack:
        node = stack.pop()
        held = lowering.storages.get(node, ())
        if node in lowering.views and unit[node] != last and any(t in written for t in held):
            unit[node] = last
            stack.extend(node.all_input_nodes)


def _erase(graph: FxGraph, members: set[Node]) -> None:
    """Erase nodes that nothing reads any more, except random operators outside of regions."""
    for node in reversed(list(graph.nodes)):
        drops = node in members or not is_random(node)
        if node.op == "call_function" and not node.users and drops:
            graph.erase_node(node)
