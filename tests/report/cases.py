"""Plans for pages: random programs with copies and recomputation, and names that are markup."""

from __future__ import annotations

import random
from dataclasses import fields as dataclass_fields
from dataclasses import replace

import memopt
from memopt.api.plan import Plan
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.plan_record import BaselineFigures
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.moved import resident_bytes_under
from memopt.programs.replay import replay
from memopt.strategies import Sequential, Status
from tests.random_programs import (
    random_host_updates,
    random_moves,
    random_program,
    with_host_updates,
)

EVIL = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "a\u2028b\u2029c&amp;\"'`${1}$$x$$",
)
"""Names that must stay names."""


def random_plan(seed: int) -> Plan:
    """A plan of a random step with recomputations and swaps over a slow link."""
    rng = random.Random(seed)
    graph = random_graph(rng, 6, implementations=seed % 2 == 0, updates=seed % 3 == 0)
    program = random_program(rng, graph, recomputations=3, swaps=3, reorder=True)
    if seed % 2:
        program = with_in_place(graph, program)
    device = memopt.Device(to_host_bytes_per_s=3.0, transfer_latency_s=0.1)
    return plan_of(graph, program, device)


def moving_plan(seed: int) -> Plan:
    """A plan of a random step, every other one repeated, whose parameters and state live on the
    host."""
    rng = random.Random(seed)
    graph = random_graph(rng, 6, updates=True)
    movable = graph.resident.difference(graph.outputs, graph.gradients)
    graph = with_host_updates(rng, replace(graph, movable=sorted(movable), repeated=seed % 2 == 1))
    program = random_program(rng, graph, recomputations=2, swaps=2)
    program = random_moves(rng, graph, random_host_updates(rng, graph, program))
    return plan_of(graph, program, memopt.Device(to_host_bytes_per_s=3.0))


def plan_of(graph: Graph, program: Program, device: memopt.Device) -> Plan:
    """A program as a plan whose budget is a few bytes above its peak."""
    timeline = replay(graph, program, device)
    return Plan(
        status=Status.FEASIBLE,
        strategy=Sequential(),
        budget=timeline.peak_bytes + 5,
        peak_bytes=timeline.peak_bytes,
        resident_bytes=resident_bytes_under(graph, program),
        step_time_s=timeline.time_s,
        lower_bound_s=graph.compute_time_s,
        baseline=BaselineFigures(timeline.peak_bytes * 2, timeline.time_s, False),
        device=device,
        program=program,
        graph=graph,
        host_peak_bytes=timeline.host_peak_bytes,
        compute_time_s=graph.compute_time_s,
    )


def renamed(plan: Plan) -> Plan:
    """The plan with markup in every name and text that a file or a model can bring."""
    graph = plan.graph

    def evil(index: int) -> str:
        return f"{EVIL[index % len(EVIL)]} {index}"

    tensors = [replace(x, name=evil(i)) for i, x in enumerate(graph.tensors)]
    operators = [
        replace(x, name=evil(i), module=f"block.{EVIL[i % 2]}", target=evil(i))
        for i, x in enumerate(graph.operators)
    ]
    device = replace(plan.device, name=EVIL[0], source=EVIL[1])
    fields = {one.name: getattr(graph, one.name) for one in dataclass_fields(graph)}
    named = Graph(**{**fields, "tensors": tensors, "operators": operators})
    return replace(plan, graph=named, device=device, notes=EVIL)
