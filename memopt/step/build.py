"""Turns the captured joint FX graph into the cost model's Graph, and maps it back for the executor.

A Tensor of the Graph is one storage of the joint graph (traced fake tensors share storages as the
real ones will); an Operator is one kernel call. View operators belong to the storage of their
argument: they cost nothing and are made again where they are read.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn
from torch.fx import Node

from memopt.errors import CaptureError
from memopt.models.device import in_blocks
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.step.backend import is_on_host
from memopt.step.captured import Captured
from memopt.step.collectives import collective_of, is_wait
from memopt.step.in_place import from_zeros_without_memory, overwritable, same_bits_in_place
from memopt.step.inputs import named_tensors
from memopt.step.kernel import FusedKernel
from memopt.step.memory_layout import storage_of
from memopt.step.nodes import (
    is_random,
    module_paths,
    only_replaces_statistics,
    overload_of,
    tensors_of,
)
from memopt.step.results import held_by, input_gradients, written_back
from memopt.step.signature import Signature, signature, values_of
from memopt.torch_private.modes import backward_owns_tangents
from memopt.torch_private.operators import OpOverload, schema_of


@dataclass(frozen=True)
class Lowering:
    """A Graph and its map to FX nodes.

    Attributes:
        graph: the cost model; times and workspaces are 0 until profiled.
        nodes: operator index → FX node (the kernel call).
        storages: tensor-valued node → indices of its tensors (one for a tensor, one per element for
            a list or tuple; None where an element is no tensor).
        views: nodes that only view existing storages, or unpack results.
        bases: tensor index → the node whose value is the storage's first tensor; no entry if the
            graph never names it (an unused output).
        alternatives: (operator index, implementation) → the node that replaces the operator's.
        device: where the kernels run; None: nothing is computed (an estimate).
    """

    graph: Graph
    nodes: tuple[Node, ...]
    storages: dict[Node, tuple[int | None, ...]]
    views: frozenset[Node]
    bases: dict[int, Node]
    alternatives: dict[tuple[int, str], Node] = field(default_factory=dict)
    device: torch.device | None = None

    def node_of(self, op: int, implementation: str | None) -> Node:
        """Return the kernel call that runs an operator under an implementation (None: its own)."""
        return self.nodes[op] if implementation is None else self.alternatives[op, implementation]

    def without(self, out: Collection[tuple[int, str]]) -> Lowering:
        """Return the lowering without some of its alternatives."""
        if not out:
            return self
        operators = [
            replace(
                o, implementations=tuple(c for c in o.implementations if (i, c.name) not in out)
            )
            for i, o in enumerate(self.graph.operators)
        ]
        kept = {key: node for key, node in self.alternatives.items() if key not in out}
        graph = replace(self.graph, operators=tuple(operators))
        return replace(self, graph=graph, alternatives=kept)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """Return the signatures of the nodes."""
        return tuple(map(signature, self.nodes))


@dataclass
class _Builder:
    block_bytes: int
    device: torch.device | None = None
    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    storages: dict[Node, tuple[int | None, ...]] = field(default_factory=dict)
    views: set[Node] = field(default_factory=set)
    bases: dict[int, Node] = field(default_factory=dict)
    by_storage: dict[int, int] = field(default_factory=dict)
    backward: set[Node] = field(default_factory=set)

    def size_of(self, value: torch.Tensor) -> int:
        own = 0 if is_on_host(value, self.device) else value.untyped_storage().nbytes()
        return in_blocks(own, self.block_bytes)

    def new_tensor(self, name: str, value: torch.Tensor, kind: TensorKind) -> int:
        index = len(self.tensors)
        self.tensors.append(Tensor(name, self.size_of(value), kind))
        self.by_storage[storage_of(value)] = index
        return index

    def find(self, value: torch.Tensor) -> int | None:
        # The graph's nodes keep their values alive, so that no storage's name is reused.
        return self.by_storage.get(storage_of(value))

    def add_given(self, node: Node, value: torch.Tensor, name: str, kind: TensorKind) -> None:
        """Add a node that exists before the step; several may share a storage."""
        index = self.find(value)
        if index is None:
            index = self.new_tensor(name, value, kind)
            self.bases[index] = node
        self.storages[node] = (index,)


def build(model: nn.Module, captured: Captured, block_bytes: int = 1) -> Lowering:
    """Build the Graph of a captured model, without costs.

    Args:
        model: the user's model (for parameters that the step never touches).
        captured: what `capture` returned.
        block_bytes: the allocator's granularity, 512 on CUDA and 1 on CPU.

    Raises:
        CaptureError: the joint graph holds an operator that memopt cannot plan.
    """
    builder = _Builder(block_bytes, captured.device)
    _add_inputs(builder, captured)
    paths = module_paths(captured.module)
    needed = _needed(captured)
    mutated = set(held_by((captured.primals[i].node for i in captured.mutated), builder.storages))
    for node in captured.module.graph.nodes:
        if node.op in ("placeholder", "output") or node not in needed:
            continue
        if node.op == "get_attr":
            _add_constant(builder, captured, node)
        elif node.op == "call_function":
            _add_call(builder, node, paths.get(node, ""), mutated)
        else:
            raise CaptureError(f"memopt cannot plan the node {node.format_node()}")
    return _finish(builder, model, captured)


def _needed(captured: Captured) -> set[Node]:
    """Return the nodes that a result depends on, and every operator that draws random numbers (so
    that the generator ends in the same state as after the unplanned model)."""
    stack = [n for n in (*captured.forward_outputs, *captured.gradients) if isinstance(n, Node)]
    stack += [n for n in captured.module.graph.nodes if is_random(n)]
    needed: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _add_inputs(builder: _Builder, captured: Captured) -> None:
    for primal in captured.primals:
        value = primal.node.meta.get("val")
        if isinstance(value, torch.Tensor):
            name = primal.name or primal.node.name
            builder.add_given(primal.node, value, name, TensorKind(primal.kind))
        else:
            builder.storages[primal.node] = (None,)
    for tangent in captured.tangents:
        builder.add_given(tangent, tangent.meta["val"], tangent.name, TensorKind.GRADIENT)
        builder.backward.add(tangent)


def _add_constant(builder: _Builder, captured: Captured, node: Node) -> None:
    value = operator.attrgetter(str(node.target))(captured.module)
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"the model uses a higher-order operator ({node.target}) that memopt cannot plan; "
            "replace torch.cond/while_loop/flex_attention there by plain tensor operators"
        )
    builder.add_given(node, value, node.name, TensorKind.CONSTANT)


def _add_call(builder: _Builder, node: Node, path: str, mutated: set[int]) -> None:
    if node.target is operator.getitem:
        _add_item(builder, node)
        return
    if is_wait(node.target):
        _add_wait(builder, node)
        return
    _check_target(node)
    reads = held_by(node.all_input_nodes, builder.storages)
    backward = node.meta.get("partitioner_tag") == "is_backward" or any(
        n in builder.backward for n in node.all_input_nodes
    )
    if backward:
        builder.backward.add(node)
    held_list: list[int | None] = []
    writes: list[int] = []
    multiple = isinstance(node.meta.get("val"), (tuple, list))
    for position, value in enumerate(values_of(node)):
        if not isinstance(value, torch.Tensor):
            held_list.append(None)
            continue
        if value.layout is not torch.strided:
            raise CaptureError(
                f"{node.target!s} makes a sparse tensor, which memopt cannot plan; use dense "
                "gradients (nn.Embedding(sparse=False)) and dense tensors"
            )
        index = builder.find(value)
        if index is None:
            name = f"{node.name}.{position}" if multiple else node.name
            kind = TensorKind.GRADIENT if backward else TensorKind.ACTIVATION
            index = builder.new_tensor(name, value, kind)
            writes.append(index)
            if not multiple:
                builder.bases[index] = node
        held_list.append(index)
    builder.storages[node] = tuple(held_list)
    random = is_random(node)
    if not writes and not random:
        builder.views.add(node)
        return
    builder.nodes.append(node)
    builder.operators.append(
        Operator(
            name=node.name,
            reads=reads,
            writes=tuple(writes),
            time_s=0.0,
            phase=Phase.BACKWARD if backward else Phase.FORWARD,
            recomputable=(mutated.isdisjoint(reads) or only_replaces_statistics(node))
            # Only the device's generator is rewound for a second run.
            and not (random and all(is_on_host(v, builder.device) for v in tensors_of(node))),
            random=random,
            module=path,
            target=str(node.target),
            collective=collective_of(node),
        )
    )


def _add_item(builder: _Builder, node: Node) -> None:
    parent, position = node.args
    held = builder.storages[parent][position]  # type: ignore[index]
    builder.storages[node] = (held,)
    builder.views.add(node)
    if held is not None:
        builder.bases.setdefault(held, node)
    if parent in builder.backward:
        builder.backward.add(node)


def _add_wait(builder: _Builder, node: Node) -> None:
    """Add a wait for a collective as a view of its result, made where it is first read."""
    (started,) = node.all_input_nodes
    (held,) = builder.storages[started]
    builder.storages[node] = (held,)
    builder.views.add(node)
    if held is not None:
        builder.by_storage[storage_of(node.meta["val"])] = held
    if started in builder.backward:
        builder.backward.add(node)


def _check_target(node: Node) -> None:
    target = overload_of(node)
    if isinstance(target, FusedKernel):
        return
    if not isinstance(target, OpOverload):
        raise CaptureError(
            f"the model uses {target!s} (in {node.format_node()}), a higher-order or Python "
            "operator that memopt cannot plan; replace it by plain tensor operators"
        )
    if schema_of(target).is_mutable:
        raise CaptureError(
            f"the model updates a tensor in place by {target!s} in a way that cannot be made "
            "functional; use the out-of-place form there"
        )
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CaptureError(
            f"{target!s} gives a number that depends on data ({node.format_node()}); memopt "
            "needs shapes and control flow that do not depend on values (.item(), .nonzero())"
        )


def _finish(builder: _Builder, model: nn.Module, captured: Captured) -> Lowering:
    outputs = held_by(captured.forward_outputs, builder.storages)
    gradients = held_by(captured.gradients, builder.storages)
    beside = _beside(builder, captured)
    operators = _with_in_place(builder, {*outputs, *gradients}, captured.device)
    for index in outputs:
        if not builder.tensors[index].resident:
            old = builder.tensors[index]
            builder.tensors[index] = Tensor(old.name, old.size_bytes, TensorKind.OUTPUT)
    order = sorted(range(len(operators)), key=lambda i: operators[i].phase is not Phase.FORWARD)
    graph = Graph(
        tensors=builder.tensors,
        operators=[operators[i] for i in order],
        outputs=outputs,
        gradients=(*gradients, *beside),
        tangents=[*(builder.storages[n][0] for n in captured.tangents), *beside],  # type: ignore[list-item]
        tangents_held=not backward_owns_tangents(),
        extra_resident_bytes=_untouched_bytes(builder, model, captured),
        written_back=written_back(captured, builder.storages, builder.tensors, operators),
        input_gradients=input_gradients(captured, builder.storages),
    )
    return Lowering(
        graph=graph,
        nodes=tuple(builder.nodes[i] for i in order),
        storages=builder.storages,
        views=frozenset(builder.views),
        bases=builder.bases,
        device=captured.device,
    )


def _beside(builder: _Builder, captured: Captured) -> tuple[int, ...]:
    """Add gradients that the loss hands to parameters and inputs themselves: autograd holds them
    from the loss boundary to the end."""
    first = len(builder.tensors)
    for position, size_bytes in captured.outputs.beside:
        size = in_blocks(size_bytes, builder.block_bytes)
        builder.tensors.append(Tensor(f"gradient of output {position}", size, TensorKind.GRADIENT))
    return tuple(range(first, len(builder.tensors)))


def _with_in_place(
    builder: _Builder, results: set[int], device: torch.device | None
) -> list[Operator]:
    """Return the operators, with the tensors that they may overwrite."""
    readers = Counter(t for operator in builder.operators for t in operator.reads)
    given = set(held_by((n for n in builder.storages if n.op != "call_function"), builder.storages))
    immutable = from_zeros_without_memory(builder.storages)
    made: list[Operator] = []
    for call, node in zip(builder.operators, builder.nodes, strict=True):
        free: list[int] = []
        for argument in overwritable(node) if node not in immutable else ():
            (tensor,) = builder.storages[argument]
            if tensor is None or tensor in given or tensor in results:
                continue
            alone = readers[tensor] == 1
            # An output of the step must be no view, as the kernel's own result would not be.
            plain = builder.bases.get(tensor) is argument
            possible = alone and (plain or call.writes[0] not in results)
            if possible and (device is None or same_bits_in_place(node, argument, device)):
                free.append(tensor)
        made.append(replace(call, in_place=tuple(free)) if free else call)
    return made


def _untouched_bytes(builder: _Builder, model: nn.Module, captured: Captured) -> int:
    """Return the bytes of parameters, buffers and inputs that are resident and never read."""
    seen = {p.name for p in captured.primals if p.kind != "input"}
    named = named_tensors(model)
    touched = {id(tensor) for name, tensor in named if name in seen}
    untouched = {storage_of(tensor): tensor for _, tensor in named if id(tensor) not in touched}
    read = {p.index for p in captured.primals if p.kind == "input"}
    for position, leaf in enumerate(captured.call.leaves):
        if isinstance(leaf, torch.Tensor) and position not in read:
            untouched[storage_of(leaf)] = leaf
    return sum(builder.size_of(tensor) for tensor in untouched.values())
