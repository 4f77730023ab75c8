"""Plot of a step's schedule: a row per module (or stage), runs and recomputations as bars."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from memopt.models.graph import Graph, Phase
from memopt.models.steps import has_transfers
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.report.module_rows import depth_for, group_of
from memopt.report.rotor_plots import plot_schedule as plot_chain_schedule
from memopt.report.style import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILION,
    legend_beside,
    new_axes,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memopt.models.device import Device
    from memopt.plan_record import PlanRecord

FORWARD, AGAIN, BACKWARD, UPDATE = "forward", "recomputed", "backward", "update"
_COLORS = {FORWARD: BLUE, AGAIN: VERMILION, BACKWARD: GREEN, UPDATE: PURPLE}
_MOST_ROWS = 40
_MOST_LABELS = 20

Bars = dict[str, list[tuple[int, float, float]]]
"""Kind of bar → (row, start, duration) of every bar, seconds."""


def plot_schedule(plan: PlanRecord, ax: Axes | None = None) -> Axes:
    """Draw when each module's operators run, or each stage of a bare chain."""
    if plan.is_of_chain and plan.chain and plan.chain_steps and not has_transfers(plan.chain_steps):
        return plot_chain_schedule(plan.chain, plan.chain_steps, ax)
    names, bars = program_bars(plan.graph, plan.program, plan.device)
    ax = new_axes(ax, 1.4 + 0.13 * max(12, len(names)))
    longest_s = max((start + long for b in bars.values() for _, start, long in b), default=0.0)
    scale, unit = time_unit(longest_s)
    thinnest = 0.002 * longest_s
    for kind, found in bars.items():
        if not found:
            continue
        by_row: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row, start, duration in found:
            by_row[row].append((scale * start, scale * max(duration, thinnest)))
        for number, (row, spans) in enumerate(sorted(by_row.items())):
            ax.broken_barh(
                spans,
                (row - 0.4, 0.8),
                color=_COLORS[kind],
                linewidth=0,
                label=kind if number == 0 else None,
            )
    every = -(-len(names) // _MOST_LABELS)
    ax.set_yticks(range(0, len(names), every), names[::every], fontsize="small")
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, scale * longest_s or 1.0)
    ax.set_xlabel(f"time in the step, predicted ({unit})")
    ax.set_ylabel("stage" if plan.is_of_chain else "module")
    ax.set_title(f"{plan.strategy.name}: what runs when", loc="left")
    legend_beside(ax)
    return ax


def program_bars(
    graph: Graph, program: Program, device: Device | None = None
) -> tuple[list[str], Bars]:
    """Return the rows' names, in the order in which the forward reaches them, and the bars."""
    depth = depth_for((operator.module for operator in graph.operators), _MOST_ROWS)
    groups = [group_of(operator.module, depth) for operator in graph.operators]
    names = list(dict.fromkeys(groups))
    row = {name: number for number, name in enumerate(names)}
    timeline = replay(graph, program, device)
    bars: Bars = {kind: [] for kind in _COLORS}
    ran: set[int] = set()
    for position, instruction in program.computes:
        operator = graph.operators[instruction.op]
        kind = {Phase.BACKWARD: BACKWARD, Phase.UPDATE: UPDATE}.get(operator.phase, FORWARD)
        if instruction.op in ran:
            kind = AGAIN
        ran.add(instruction.op)
        start_s = timeline.start_s[position]
        bars[kind].append(
            (row[groups[instruction.op]], start_s, timeline.end_s[position] - start_s)
        )
    return names, bars
