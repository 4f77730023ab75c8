"""Joins collectives of single parameters into one of several, as FSDP2 has one for each block.

`memopt.shard` gathers each parameter by a call of its own. The joint graph gets one call for each
bucket. The gathers become a coalesced all-gather, with a result for each, at the place of the first
of them. The scatters become a reduce-scatter of the packed gradients (`aten._chunk_cat`, FSDP2's
layout), at the place of the last, and the gradients are views of its result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.step.collectives import WAIT
from memopt.step.joint_graph import described, split_joint
from memopt.step.shards import any_shards
from memopt.torch_private.operators import aten as _ATEN
from memopt.torch_private.operators import collectives

BUCKETS = "memopt_buckets"
"""Attribute of a sharded module's class: parameter's name in the module → its bucket."""

OTHER_ENGINES = (
    "a whole step is planned of models that memopt.shard has spread over the ranks, not of those "
    "that fully_shard, replicate or parallelize_module have: call memopt.shard(model, mesh) "
    "instead; or plan the module (whole_step=False, or memopt.wrap), and call the optimizer's "
    "step() yourself"
)
"""Why there is no whole step of a model for which `only_shards` is false."""

_OPS = collectives()
_GATHER = _OPS.all_gather_into_tensor.default
_GATHERS = _OPS.all_gather_into_tensor_coalesced.default
_SCATTER = _OPS.reduce_scatter_tensor.default
_REDUCE = _OPS.all_reduce.default
AFTER_SCATTER = frozenset(
    {
        WAIT,
        _REDUCE,
        _ATEN.slice.Tensor,
        _ATEN._to_copy.default,
        _ATEN.add.Tensor,
        _ATEN.clone.default,
        _ATEN.permute.default,
        _ATEN.view.default,
    }
)
"""Operators that may stand between a scatter and the gradient that is returned."""


_Found = dict[Node, tuple[int, int]]
"""Parameter, or its collective → its bucket and its place among the parameters."""


def buckets_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Map each parameter that `memopt.shard` put in a bucket, by its name in the model, to the
    bucket and the parameter's number among all such parameters."""
    found: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        buckets: Mapping[str, int] = getattr(type(module), BUCKETS, {})
        for name, bucket in buckets.items():
            found[f"{path}.{name}" if path else name] = (bucket, len(found))
    return found


def only_shards(model: nn.Module) -> bool:
    """Return whether all DTensors among a model's parameters and buffers are `memopt.shard`'s,
    whose gradients are averaged in the graph and placed as they are."""
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not hasattr(type(module), BUCKETS) and any_shards(own):
            return False
    return True


def join_collectives(
    module: GraphModule, buckets: Mapping[str, tuple[int, int]], names: Mapping[str, str]
) -> None:
    """Join the gathers, and the scatters, of each bucket, in place.

    Args:
        module: a joint graph.
        buckets: see `buckets_of`.
        names: parameter's name in the graph → its name in the model.
    """
    bucket_of: _Found = {}
    for node in module.graph.find_nodes(op="placeholder"):
        descriptor, _ = described(node)
        if type(descriptor).__name__ == "ParamAOTInput":
            name = names[descriptor.target]
            bucket_of.update({node: buckets[name]} if name in buckets else {})
    if not bucket_of:
        return
    for members in _groups(_gathers(module, bucket_of)):
        _join_gathers(module, members)
    for members in _groups(_scatters(module, bucket_of)):
        _join_scatters(module, members)
    module.graph.lint()
    module.recompile()


def _gathers(module: GraphModule, bucket_of: _Found) -> _Found:
    """Find the gathers whose results are read. (A module that only asks whether it has a parameter
    gathers it, too.)"""
    found: _Found = {}
    for node in module.graph.find_nodes(op="call_function", target=_GATHER):
        *_, source = _chain(node)
        if source in bucket_of and any(user.users for user in node.users):
            found[node] = bucket_of[source]
    return found


def _chain(gather: Node) -> Iterator[Node]:
    """Yield nodes from a gather's argument back to the first without exactly one argument."""
    (node,) = gather.all_input_nodes
    yield node
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        yield node


def _scatters(module: GraphModule, bucket_of: _Found) -> _Found:
    split = split_joint(module)
    found: _Found = {}
    for primal, gradient in zip(split.primals, split.gradients, strict=True):
        if primal not in bucket_of or not isinstance(gradient, Node):
            continue
        stack = [gradient]
        while stack:
            node = stack.pop()
            if node.target is _SCATTER:
                found[node] = bucket_of[primal]
            elif node.target in AFTER_SCATTER:
                stack.extend(node.all_input_nodes)
    return found


def _groups(found: _Found) -> list[list[Node]]:
    """Group the collectives that become one: each group in the order of its parameters, the groups
    in the order in which they are complete. A bucket's collectives share a group until a parameter
    repeats (a module that is called twice, a tied parameter)."""
    groups: list[list[Node]] = []
    present: dict[Any, tuple[list[Node], set[int]]] = {}
    for node in sorted(found):
        bucket, place = found[node]
        backward = node.meta.get("partitioner_tag") == "is_backward"
        key = (bucket, node.meta["val"].dtype, backward, *node.args[1:])
        if key not in present or place in present[key][1]:
            present[key] = ([], set())
            groups.append(present[key][0])
        members, places = present[key]
        members.append(node)
        places.add(place)
    several = sorted((group for group in groups if len(group) > 1), key=max)
    return [sorted(group, key=lambda node: found[node][1]) for group in several]


def _join_gathers(module: GraphModule, members: Sequence[Node]) -> None:
    """Make one coalesced gather, at the first member: the members' arguments are made of parameters
    alone, so that they can move there."""
    graph = module.graph
    first = min(members)
    for member in members:
        for node in reversed(list(_chain(member))):
            if first < node:
                first.prepend(node)
    with graph.inserting_before(first):
        shards = [member.args[0] for member in members]
        together = graph.call_function(_GATHERS, (shards, *first.args[1:]))
        together.meta = {**first.meta, "val": [member.meta["val"] for member in members]}
        for position, member in enumerate(members):
            result = graph.call_function(operator.getitem, (together, position))
            result.meta = dict(member.meta)
            member.replace_all_uses_with(result)
    for member in members:
        graph.erase_node(member)


def _join_scatters(module: GraphModule, members: Sequence[Node]) -> None:
    """Make one scatter of all gradients packed, at the last member. Nodes computed from the
    members' results move after it."""
    graph, last = module.graph, max(members)
    later = _made_of(members)
    if not later.isdisjoint(members):
        return
    place = last
    for node in sorted(node for node in later if node < last):
        place.append(node)
        place = node
    ends, reduced = _final_waits(members)

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta = {**last.meta, "val": _value(node)}
        return node

    with graph.inserting_before(last):
        whole = call(_ATEN._chunk_cat.default, [m.args[0] for m in members], 0, last.args[2])
        whole = call(WAIT, call(_SCATTER, whole, *last.args[1:]))
        if reduced is not None:
            whole = call(WAIT, call(_REDUCE, whole, *reduced.args[1:]))
        begin = 0
        for member, end in zip(members, ends, strict=True):
            value = member.meta["val"]
            part = call(_ATEN.slice.Tensor, whole, 1, begin, begin + value.numel())
            end.replace_all_uses_with(call(_ATEN.view.default, part, list(value.shape)))
            begin += value.numel()
    for end, member in zip(ends, members, strict=True):
        while end is not member:
            later.discard(end)
            (before,) = end.all_input_nodes
            graph.erase_node(end)
            end = before
        graph.erase_node(member)
    for node in sorted(later):
        node.meta["val"] = _value(node)


def _made_of(nodes: Iterable[Node]) -> set[Node]:
    """Return all calls that read nodes, directly or indirectly."""
    found: set[Node] = set()
    stack = [user for node in nodes for user in node.users]
    while stack:
        node = stack.pop()
        if node.op != "output" and node not in found:
            found.add(node)
            stack.extend(node.users)
    return found


def _final_waits(scatters: Iterable[Node]) -> tuple[list[Node], Node | None]:
    """Return the waits that end the scatters, and None. If every scattered gradient is then reduced
    over the replicas in the same way (HSDP), return the waits for these reductions instead, and one
    of the reductions."""
    waits = [_user(scatter) for scatter in scatters]
    reduced = [_user(wait) for wait in waits if len(wait.users) == 1]
    alike = len(reduced) == len(waits) and all(node.target is _REDUCE for node in reduced)
    if alike and len({node.args[1:] for node in reduced}) == 1:
        return [_user(node) for node in reduced], reduced[0]
    return waits, None


def _user(node: Node) -> Node:
    return next(iter(node.users))


def _value(node: Node) -> Any:
    """Return a call's result, in fake tensors."""
    given, named = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    target: Any = node.target
    with torch.no_grad():
        return target(*given, **named)
