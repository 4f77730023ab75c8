"""One row of OLLA's tables: a captured training step ordered, placed and replayed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

import memopt
from benchmarks.olla_graphs import family_of, graph_of
from benchmarks.steps import peak_of
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.profiler.inputs import to_call
from memopt.programs.allocator_requests import reserved_by
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.olla import Olla, order_program, place_program
from memopt.strategies.olla.program_tasks import tasks_of
from memopt.strategies.olla.task_contraction import eager
from tests import zoo
from tests.zoo.family import TINY_BATCH

TIME_LIMIT_S = 60.0
SMALL: tuple[int, zoo.Size] = (TINY_BATCH, "tiny")
"""Batch and size at which every step is measured."""


@dataclass(frozen=True)
class Placed:
    """A placement: what it took and how far it is from its bound.

    Attributes:
        arena_bytes, bound_bytes: extent of all addresses; the most bytes live at once.
        cpu_s: of the search.
        trace: (seconds, extent, bound) whenever it got better.
        reserved_bytes, allocated_bytes: what the caching allocator would hold and hand out at
            most, without the addresses, resident tensors included.
        arena_reserved_bytes: the same with the arena as one allocation.
    """

    arena_bytes: int
    bound_bytes: int
    cpu_s: float
    trace: list[list[float]]
    reserved_bytes: int
    allocated_bytes: int
    arena_reserved_bytes: int


@dataclass(frozen=True)
class Row:
    """One training step. Bytes include resident ones.

    Attributes:
        framework_bytes: the framework's order, updates at the end.
        early_bytes: the framework's order with every update as early as it can be.
        peak_bytes, bound_bytes: of the best order found, and of any.
        order_s: CPU seconds of the search for an order.
        trace: (seconds, peak, bound) whenever either got better.
        own, best: placements of the framework's and of the best order (dicts of `Placed`).
    """

    name: str
    batch: int
    operators: int
    resident_bytes: int
    framework_bytes: int
    early_bytes: int
    peak_bytes: int
    bound_bytes: int
    order_s: float
    trace: list[list[float]]
    own: dict[str, Any]
    best: dict[str, Any]


@dataclass(frozen=True)
class MeasuredRow:
    """A step that ran here. Peaks include resident bytes.

    Attributes:
        size: "paper", or "tiny": narrow, on small inputs.
        eager_bytes: PyTorch's own step, measured.
        planned_bytes: of OLLA's order, predicted with measured workspaces.
        step_bytes: of the planned step, measured.
        order_bound_bytes: no order has a smaller predicted peak.
    """

    name: str
    batch: int
    size: str
    resident_bytes: int
    eager_bytes: int
    planned_bytes: int
    step_bytes: int
    order_bound_bytes: int


def warm_up() -> None:
    """Compile what is compiled, so that no row pays for it."""
    graph = random_graph(Random(2), 30, updates=True)
    place_program(graph, order_program(graph, store_all(graph))[0])


def row_of(name: str, batch: int, folder: Path | None) -> Row:
    """Order and place one step."""
    graph = graph_of(name, batch, folder)
    own = with_in_place(graph, store_all(graph))
    trace: list[list[float]] = []
    began = time.process_time()
    best, ordering = order_program(
        graph,
        own,
        time_limit_s=TIME_LIMIT_S,
        on_improvement=lambda *point: trace.append([float(x) for x in point]),
    )
    order_s = time.process_time() - began
    tasks = tasks_of(graph, own).tasks
    early_bytes = tasks.peak(eager(tasks, tasks.topological))
    if validate(graph, best) is not None or ordering.peak > early_bytes:
        raise AssertionError(f"{name} b{batch}: the order is invalid or worse than the framework's")
    return Row(
        name=name,
        batch=batch,
        operators=len(graph.operators),
        resident_bytes=graph.resident_bytes,
        framework_bytes=replay(graph, own).peak_bytes,
        early_bytes=early_bytes,
        peak_bytes=ordering.peak,
        bound_bytes=ordering.bound,
        order_s=order_s,
        trace=trace,
        own=vars(_placed(graph, own)),
        best=vars(_placed(graph, best)),
    )


def _placed(graph: Graph, program: Program) -> Placed:
    trace: list[list[float]] = []
    began = time.process_time()
    placed, placement = place_program(
        graph,
        program,
        time_limit_s=TIME_LIMIT_S,
        on_improvement=lambda *point: trace.append([float(x) for x in point]),
    )
    cpu_s = time.process_time() - began
    violation = validate(graph, placed)
    if violation is not None:
        raise AssertionError(f"the placement is invalid: {violation}")
    loose, tight = (reserved_by(graph, p) for p in (program, placed))
    return Placed(
        placement.peak,
        placement.bound,
        cpu_s,
        trace,
        loose.reserved_peak_bytes,
        loose.allocated_peak_bytes,
        tight.reserved_peak_bytes,
    )


def measured_row(name: str, batch: int, size: zoo.Size) -> MeasuredRow:
    """Run PyTorch's step and the planned one, on the CPU."""
    family = family_of(name)
    model = family.build(size)
    inputs = family.inputs(size, batch=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    plan = memopt.plan(
        model, inputs, loss_fn=family.loss, optimizer=optimizer, strategy=Olla(place=False),
        cache=False, progress=False,
    )  # fmt: skip
    call = to_call(inputs)
    step = plan.train_step(model, family.loss, optimizer)
    peak = peak_of(model, lambda: step(*call.args, **call.kwargs), torch.device("cpu"))
    bound = plan.stats["order_bound_bytes"]
    assert isinstance(bound, int)
    return MeasuredRow(
        name,
        batch,
        size,
        plan.resident_bytes,
        plan.baseline.peak_bytes,
        plan.peak_bytes,
        plan.resident_bytes + peak,
        bound,
    )
