"""Inductor's joint graph in memopt's form, and the tensors that a plan saves of it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Set
from typing import Any

from torch import SymBool, SymFloat, SymInt
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from memopt.errors import MemoptError
from memopt.models.graph import Graph, Phase
from memopt.plan_record import PlanRecord
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import with_frees
from memopt.step.build import Lowering
from memopt.step.captured import Captured, Hooks, Primal
from memopt.step.inputs import Call
from memopt.step.results import held_by
from memopt.torch_private.operators import OpOverload, schema_of

NAME = "memopt_node"
"""Key in a node's `meta` for the node's name in Inductor's graph."""


def moves_tensors(strategy: str) -> MemoptError:
    """Make the error for a strategy whose plans Inductor's own pipeline cannot follow."""
    return MemoptError(
        f"strategy {strategy!r} moves tensors to the host, which Inductor's own pipeline does not: "
        'name one that recomputes ("rotor", "monet"), or use torch.compile(backend="memopt")'
    )


def kept_by(plan: PlanRecord) -> frozenset[int]:
    """Return the tensors that a plan has in memory at the loss boundary.

    Raises:
        MemoptError: the plan moves tensors to the host.
    """
    if plan.program.has_transfers:
        raise moves_tensors(plan.strategy.name)
    return kept_at_loss(plan.graph, plan.program)


def kept_at_loss(graph: Graph, program: Program) -> frozenset[int]:
    """Return the tensors that a program has in memory at the loss boundary."""
    boundary = program.boundary
    if boundary is None:
        return frozenset()
    lives = lifetimes(graph, program).device
    return frozenset(life.tensor for life in lives if life.is_live_at(boundary))


def made_again_once(graph: Graph, kept: frozenset[int]) -> Program:
    """Build the step as Inductor runs it: a tensor that the backward reads and that is not saved is
    recomputed once, before its first reader there, and stays until its last."""
    backward = [i for i, one in enumerate(graph.operators) if one.phase is not Phase.FORWARD]
    forward = range(len(graph.operators) - len(backward))
    instructions: list[Instruction] = [Compute(op, ()) for op in forward]
    instructions.append(LossBoundary())
    there = set(kept) | {t for t in range(len(graph.tensors)) if t not in graph.producer}
    there |= set(graph.outputs)
    for op in backward:
        stack = [op]
        while stack:
            missing = {t for t in graph.operators[stack[-1]].reads if t not in there}
            if missing:
                stack.append(graph.producer[min(missing)])
            else:
                done = stack.pop()
                instructions.append(Compute(done, ()))
                there |= set(graph.operators[done].writes)
    return Program(with_frees(graph, instructions))


def saved_tensors(lowering: Lowering, names: Set[str]) -> frozenset[int]:
    """Return the tensors that nodes with these names in Inductor's graph make or view."""
    nodes = [node for node in lowering.storages if node.meta.get(NAME) in names]
    return frozenset(held_by(nodes, lowering.storages)) & set(lowering.graph.producer)


def captured_joint(gm: GraphModule, outputs: int) -> Captured:
    """Copy Inductor's joint graph into memopt's form, and note its nodes' names."""
    for node in gm.graph.nodes:
        node.meta[NAME] = node.name
    graph = FxGraph()
    copies: dict[Node, Node] = {}
    results: Any = graph.graph_copy(gm.graph, copies)
    graph.output(results)
    module = GraphModule(gm, graph)
    primals, tangents = [], []
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), (SymInt, SymFloat, SymBool)):
            raise MemoptError(
                "memopt.partitioner plans one size: compile with dynamic=False, or leave "
                "mark_dynamic out"
            )
        if "tangents" in node.name:
            tangents.append(node)
        else:
            primals.append(Primal(node, "parameter", node.name))
    return Captured(
        module=module,
        primals=tuple(primals),
        tangents=tuple(tangents),
        forward_outputs=tuple(results[:outputs]),
        gradients=tuple(results[outputs:]),
        mutated=(),
        given=(),
        call=Call((), {}),
        compiled=lambda: None,
        hooks=Hooks(),
        model=weakref.ref(module),
    )


def is_view(node: Node) -> bool:
    """Whether a call returns a view of an operand."""
    schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
    return schema is not None and any(one.alias_info is not None for one in schema.returns)


def forward_nodes(gm: GraphModule) -> list[Node]:
    """Return the calls that no tangent reaches."""
    backward: set[Node] = set()
    found = []
    for node in gm.graph.nodes:
        given = node.op == "placeholder" and "tangents" in node.name
        if given or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            found.append(node)
    return found
