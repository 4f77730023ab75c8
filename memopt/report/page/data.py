"""The page's data, one JSON object: the tables, the plans and the curve.

Every figure is the plan's own. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from memopt.comparison_record import CellRecord, ComparisonRecord
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.plan_record import PlanRecord
from memopt.programs.instructions import Compute, Program
from memopt.programs.lifetimes import Lifetime, lifetimes
from memopt.programs.liveness import store_all
from memopt.programs.moved import moved_tensors, resident_under
from memopt.programs.replay import Direction, Timeline, replay
from memopt.report.comparison_plot import bounds
from memopt.report.ladder import Rung, next_steps
from memopt.report.lanes import StepLanes
from memopt.report.memory_profile import GRADIENTS, LAYERS
from memopt.report.module_rows import module_rows
from memopt.report.page.tables import GraphTables
from memopt.report.peak import fixed_bytes
from memopt.report.plan_numbers import baseline_figures, plan_figures
from memopt.report.step_check import StepCheck
from memopt.report.style import memory_unit, time_unit


@dataclass(frozen=True)
class Subject:
    """The subject of a page.

    Attributes:
        title: for people: the model.
        comparison: the plans, as cells; at least one has a plan.
        opened: the plan that the page shows first.
        texts: tensor → dtype and shape, of the plans' graph.
        optimizer_parts: (what, bytes) of optimizer state that is resident beside the graph.
        savings: (change, bytes that it frees) of ways to save memory that are no points of the
            curve.
        measured: a recorded step of `opened`.
        check: the recorded step's measured peak and time.
        notes: shown beside the plans' own notes.
    """

    title: str
    comparison: ComparisonRecord[CellRecord]
    opened: PlanRecord
    texts: Mapping[int, str] = field(default_factory=dict)
    optimizer_parts: tuple[tuple[str, int], ...] = ()
    savings: tuple[tuple[str, int], ...] = ()
    measured: StepLanes | None = None
    check: StepCheck | None = None
    notes: tuple[str, ...] = ()


def page_data(subject: Subject) -> dict[str, Any]:
    """Collect the page's data."""
    made = _Collected(subject)
    cells = [made.cell(cell) for cell in subject.comparison.cells]
    opened = made.plan(subject.opened)
    comparison, device = subject.comparison, subject.opened.device
    measured = comparison.measured_baseline
    # Each graph adds the program of its own order, so this comes before `made.programs` is read.
    graphs = [made.graph_rows(number) for number in range(len(made.tables))]
    for plan in made.plans:
        plan["next"] = _next(plan, cells, subject.savings)
    return {
        "title": subject.title,
        "notes": list(subject.notes),
        "units": _units(subject),
        "device": {"name": device.name, "capacity_bytes": device.capacity_bytes},
        "layers": list(LAYERS),
        "graphs": graphs,
        "programs": made.programs,
        "plans": made.plans,
        "opened": opened,
        "curve": {
            "strategies": list(comparison.strategies),
            "cells": cells,
            "bounds": [list(point) for point in bounds(comparison)],
            "baseline": baseline_figures(comparison.baseline),
            "measured_baseline": None if measured is None else baseline_figures(measured),
            "compute_time_s": comparison.compute_time_s,
            "complete": comparison.complete,
        },
        "check": None if subject.check is None else asdict(subject.check),
        "measured": None
        if subject.measured is None
        else [
            [span.lane.value, span.name, span.start_s, span.end_s, span.stall]
            for span in sorted(subject.measured.spans, key=lambda span: span.start_s)
        ],
    }


def _next(
    plan: Mapping[str, Any],
    cells: Iterable[Mapping[str, Any]],
    savings: Iterable[tuple[str, int]],
) -> list[dict[str, Any]]:
    """Give the cheapest next steps from a plan, as the ladder does: to cells' plans, and other
    savings, which have none."""
    here = _rung(plan)
    numbers = {_rung(cell): cell["plan"] for cell in cells if cell["plan"] is not None}
    others = [
        Rung((change,), True, peak_bytes=plan["peak_bytes"] - freed_bytes)
        for change, freed_bytes in savings
    ]
    return [
        {
            "bytes": step.more_bytes,
            "share": step.slower,
            "plan": numbers.get(step.rung),
            "text": str(step),
        }
        for step in next_steps(here, [*numbers, *others])
    ]


def _rung(figures: Mapping[str, Any]) -> Rung:
    return Rung(
        (figures["strategy"],),
        True,
        peak_bytes=figures["peak_bytes"],
        step_time_s=figures["step_time_s"],
    )


def _units(subject: Subject) -> dict[str, Any]:
    """Choose the axes' units, the same for every plan, so that their pictures can be compared."""
    plans = [cell.plan for cell in subject.comparison.cells if cell.plan is not None]
    plans.append(subject.opened)
    baseline = subject.comparison.baseline
    memory = memory_unit(max(baseline.peak_bytes, *(plan.peak_bytes for plan in plans)))
    longest_s = max(baseline.step_time_s, *(plan.step_time_s for plan in plans))
    time = time_unit(longest_s)
    return {
        "memory": {"size": memory[0], "name": memory[1]},
        "time": {"size": time[0], "name": time[1]},
        "in_steps": longest_s <= 0,
    }


class _Collected:
    """The plans of a page, each graph and each program once."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.tables: list[GraphTables] = []
        self.programs: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self._known_graphs: dict[int, int] = {}
        self._known_programs: list[tuple[int, Program]] = []
        self._known_plans: list[PlanRecord] = []

    def cell(self, cell: CellRecord) -> dict[str, Any]:
        """Return a point of the curve; its `plan` is the number of its plan, or null."""
        names = [one.name for one in fields(CellRecord) if one.name != "plan"]
        figures = {name: getattr(cell, name) for name in names}
        number = None if cell.plan is None else self.plan(cell.plan)
        return {**figures, "status": cell.status.value, "plan": number}

    def plan(self, plan: PlanRecord) -> int:
        """Return a plan's number; a new plan is added."""
        for number, known in enumerate(self._known_plans):
            same = known.program == plan.program and plan_figures(known) == plan_figures(plan)
            if known is plan or same:
                return number
        graph = self._graph(plan.graph)
        program = self._program(graph, plan.program, plan.device)
        self._known_plans.append(plan)
        self.plans.append({**plan_figures(plan), "program": program})
        return len(self.plans) - 1

    def graph_rows(self, number: int) -> dict[str, Any]:
        """Return a graph's tables, and the number of the program that runs every operator once."""
        tables = self.tables[number]
        own = self._program(number, store_all(tables.graph), self._subject.opened.device)
        return {**tables.rows(), "own_program": own}

    def _graph(self, graph: Graph) -> int:
        if id(graph) not in self._known_graphs:
            equal = (n for n, one in enumerate(self.tables) if one.graph == graph)
            number = next(equal, len(self.tables))
            if number == len(self.tables):
                opened = graph == self._subject.opened.graph
                self.tables.append(GraphTables(graph, self._subject.texts if opened else {}))
            self._known_graphs[id(graph)] = number
        return self._known_graphs[id(graph)]

    def _program(self, graph: int, program: Program, device: Device) -> int:
        for number, (of, known) in enumerate(self._known_programs):
            if of == graph and known == program:
                return number
        tables = self.tables[graph]
        of_tensor, of_operator = tables.group_of_tensor, tables.group_of_operator
        rows = module_rows(
            tables.graph, program, device, len(tables.groups), of_tensor, of_operator
        )
        standing = fixed_bytes(
            tables.graph, self._subject.optimizer_parts, moved_tensors(tables.graph, program)
        )
        self._known_programs.append((graph, program))
        self.programs.append(
            {
                "graph": graph,
                **packed(tables, program, device),
                "resident_parts": [list(x) for x in standing if x[0] != GRADIENTS],
                "modules": [list(asdict(row).values()) for row in rows],
            }
        )
        return len(self.programs) - 1


WAIT, LOSS, MOVED = -1, -2, 3
"""Codes of moments: a wait; the loss; -(MOVED + 3t + c) for a move of tensor t, where c = 0: a copy
to the host begins, 1: a copy back begins, 2: a host copy is dropped."""

STREAMS = (Direction.TO_HOST, Direction.FROM_HOST, Direction.NETWORK, Direction.HOST)
"""The streams beside compute; copies refer to them by position."""

TRANSIENT, FETCHED, TAKES_OVER, STAYS, TANGENT = 1, 2, 4, 8, 16
"""Flags of a lifetime: written and not kept; begun by a copy back; in the storage of another
tensor; live at the end of the step; begun by the loss."""


def packed(tables: GraphTables, program: Program, device: Device) -> dict[str, Any]:
    """Encode a program's moments, waits, lifetimes and copies.

    A moment is an instruction other than a Free, or a wait before an instruction. In a list of
    moments a number of at least 0 is a run of `GraphTables`; a negative one is a code, see `WAIT`,
    `LOSS` and `MOVED`. Lifetimes are half-open intervals of moments, so that their sizes, the
    resident bytes and the workspace add up to the replay's memory, byte for byte.

    `waits` are the (begin, end) of each wait in order, seconds; every other moment starts when
    the one before it is over and takes its run's time. `lifetimes` is a flat list of rows of four
    integers: tensor, first moment less that of the row before, number of moments, flags. `copies`
    are (tensor, number in `STREAMS`, start and end in seconds), including collectives and updates
    on the host. `host` are the host copies, rows of tensor, first moment and moment of its end.
    `resident` are the tensors that are on the device during the whole step.
    """
    timeline = replay(tables.graph, program, device)
    keys, moments, waits = _moments(tables, program, timeline)
    peak = timeline.peak_instruction
    found = lifetimes(tables.graph, program)
    runs = dict(program.computes)
    rows: list[int] = []
    last = 0
    for lifetime in found.device:
        begin = bisect_left(keys, 2 * lifetime.begin + 1)
        end = bisect_left(keys, _after(lifetime))
        flags = _flags(lifetime, runs, program.boundary)
        rows += [lifetime.tensor, begin - last, end - begin, flags]
        last = begin
    host = [
        [one.tensor, bisect_left(keys, 2 * one.begin + 1), bisect_left(keys, 2 * one.end + 1)]
        for one in found.host
    ]
    return {
        "moments": moments,
        "waits": waits,
        "lifetimes": rows,
        "host": host,
        "resident": sorted(resident_under(tables.graph, program)),
        "copies": [
            [x.tensor, STREAMS.index(x.direction), x.start_s, x.end_s]
            for x in (*timeline.transfers, *timeline.collectives, *timeline.host_updates)
        ],
        "peak": None if peak is None else bisect_left(keys, 2 * peak + 1),
        "time_s": timeline.time_s,
        "backward_s": None if program.boundary is None else timeline.end_s[program.boundary],
    }


def _moments(
    tables: GraphTables, program: Program, timeline: Timeline
) -> tuple[list[int], list[int], list[list[float]]]:
    """Return the moments' (keys, codes, waits); a key is 2·position + 1 for an instruction and
    2·position for a wait before it."""
    runs, steps = dict(program.computes), set(program.steps)
    keys: list[int] = []
    moments: list[int] = []
    waits: list[list[float]] = []
    for position, instruction in enumerate(program):
        stall_s, start_s = timeline.stall_s[position], timeline.start_s[position]
        if stall_s > 0:
            keys.append(2 * position)
            moments.append(WAIT)
            waits.append([start_s - stall_s, start_s])
        if position not in steps:
            continue
        keys.append(2 * position + 1)
        if position in runs:
            moments.append(tables.run(runs[position]))
        elif position == program.boundary:
            moments.append(LOSS)
        else:
            effects = instruction.effects(tables.graph)
            named = (effects.host_begins, effects.begins, effects.host_ends)
            code, tensor = next((c, x[0]) for c, x in enumerate(named) if x)
            moments.append(-(MOVED + 3 * tensor + code))
    return keys, moments, waits


def _after(lifetime: Lifetime) -> int:
    """Return the first key at which a lifetime takes no memory. A freed tensor is still in memory
    while its Free waits; an overwritten one, while the Compute over it waits."""
    if lifetime.transient:
        return 2 * lifetime.end
    return 2 * lifetime.end + (2 if lifetime.freed else 1)


def _flags(lifetime: Lifetime, runs: Mapping[int, Compute], boundary: int | None) -> int:
    begun_by_loss = lifetime.begin == boundary
    return (
        TRANSIENT * lifetime.transient
        + FETCHED * (lifetime.begin not in runs and not begun_by_loss)
        + TAKES_OVER * (lifetime.overwrites is not None)
        + STAYS * lifetime.stays
        + TANGENT * begun_by_loss
    )
