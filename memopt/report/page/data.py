"""The page's data, one JSON object: the tables, the plans and the curve.

Every figure is the plan's own. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from memopt.comparison_record import CellRecord, ComparisonRecord
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.plan_record import PlanRecord
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.moved import moved_tensors
from memopt.report.comparison_plot import bounds
from memopt.report.fixed_bytes import fixed_bytes
from memopt.report.ladder import Rung, next_steps
from memopt.report.lanes import StepLanes
from memopt.report.memory_profile import GRADIENTS, LAYERS
from memopt.report.module_rows import module_rows
from memopt.report.page.steps import packed
from memopt.report.page.tables import GraphTables
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
        "measured": None if subject.measured is None else _spans(subject.measured),
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


def _spans(step: StepLanes) -> list[list[object]]:
    """List a recorded step's (lane, name, start and end in seconds, whether it is a wait)."""
    return [
        [span.lane.value, span.name, span.start_s, span.end_s, span.stall]
        for span in sorted(step.spans, key=lambda span: span.start_s)
    ]


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
