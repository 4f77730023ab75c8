"""A plan as text of at most 80 columns, and the same sections for other displays."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.report.peak import peak_of
from memopt.report.texts import counted, format_seconds
from memopt.report.work import moved, offloaded_stages, recomputed, stage_runs

if TYPE_CHECKING:
    from memopt.models.device import Device
    from memopt.models.graph import Graph
    from memopt.models.steps import ChainStep
    from memopt.plan_record import PlanRecord
    from memopt.programs.instructions import Program

WIDTH = 80
_CONSUMERS = 5
_RANGES = 8


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table of texts."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def sections(plan: PlanRecord) -> tuple[Section, ...]:
    """Everything the summary says: the figures first, under an empty title."""
    found = [Section("", _figures(plan))]
    graph, program = plan.graph, plan.program
    if graph is not None and program is not None:
        found += [*_peak(graph, program, plan.device), _recomputed(graph, program)]
    if plan.chain is not None and plan.chain_steps is not None:
        found.append(_stages(len(plan.chain), plan.chain_steps))
    if graph is not None and program is not None:
        found.append(_moved(graph, program))
    return tuple(section for section in found if section.rows)


def plan_summary(plan: PlanRecord) -> str:
    """The figures a user asks for first, in aligned lines of at most 80 columns."""
    lines: list[str] = []
    for section in sections(plan):
        if section.title:
            lines += textwrap.wrap(section.title, WIDTH)
        lines += _aligned(section.rows, indent=2 if section.title else 0)
    for note in plan.notes:
        lines += textwrap.wrap(note, WIDTH)
    return "\n".join(lines)


def _aligned(rows: tuple[tuple[str, ...], ...], indent: int) -> list[str]:
    """Rows in columns, the last one wrapped within its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *before, last in rows:
        cells = (text.ljust(width) for text, width in zip(before, widths, strict=False))
        start = " " * indent + "".join(f"{cell}  " for cell in cells)
        lines += textwrap.wrap(
            last, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
        ) or [start.rstrip()]
    return lines


def _figures(plan: PlanRecord) -> tuple[tuple[str, ...], ...]:
    budget = "no limit" if plan.budget is None else format_bytes(plan.budget)
    kind = "measured" if plan.baseline.measured else "replayed"
    saved = 1 - plan.peak_bytes / plan.baseline.peak_bytes if plan.baseline.peak_bytes else 0.0
    than = "below" if saved >= 0 else "above"
    rows = [
        ("strategy", f"{plan.strategy!r}, {plan.status.value}"),
        ("budget", budget),
        (
            "peak",
            f"{format_bytes(plan.peak_bytes)} predicted, {abs(saved):.0%} {than} the baseline; "
            f"{format_bytes(plan.resident_bytes)} of it never moves",
        ),
        ("baseline peak", f"{format_bytes(plan.baseline.peak_bytes)} ({kind})"),
        (
            "step time",
            f"{format_seconds(plan.step_time_s)} predicted, {plan.overhead:+.1%} over running "
            "every operator once",
        ),
        ("baseline time", f"{format_seconds(plan.baseline.step_time_s)} ({kind})"),
        ("bound", f"{format_seconds(plan.lower_bound_s)}, gap {plan.gap:.2%}"),
    ]
    if plan.host_peak_bytes:
        rows.append(("host memory", f"{format_bytes(plan.host_peak_bytes)} for swapped tensors"))
    return (*rows, *_passes(plan.stats))


def _passes(stats: Mapping[str, object]) -> list[tuple[str, str]]:
    """The effect of reordering and placement, from the statistics of the passes and of OLLA."""
    rows = []
    before, gap = stats.get("peak_before_order_bytes"), stats.get("order_gap")
    if isinstance(before, int) and isinstance(gap, float):
        rows.append(
            ("reordered", f"peak {format_bytes(before)} before, gap to the bound {gap:.2%}")
        )
    arena, bound = stats.get("arena_bytes"), stats.get("arena_bound_bytes")
    lost = stats.get("fragmentation")
    if isinstance(arena, int) and isinstance(bound, int) and isinstance(lost, float):
        text = f"{format_bytes(arena)}, bound {format_bytes(bound)}, fragmentation {lost:.2%}"
        rows.append(("arena", text))
        total, apart = stats.get("placed_peak_bytes"), stats.get("apart_bytes")
        if isinstance(total, int) and isinstance(apart, int):
            text = f"{format_bytes(total)} with what lies outside"
            if apart:
                text += f"; {format_bytes(apart)} left there, too dear to place"
            rows.append(("", text))
        if stats.get("shortened"):
            slower = stats.get("slower")
            cost = _slower(slower) if isinstance(slower, float) and slower else "no slower"
            rows.append(("", f"tensors freed earlier, fetched later to fit; {cost}"))
    elif stats.get("placed") is False:
        rows.append(("arena", "none: beside what lies outside, it would cost too much"))
    return rows


def _slower(share: float) -> str:
    text = f"{share:.2%}"
    return "less than 0.01% slower" if text == "0.00%" else f"{text} slower"


def _peak(graph: Graph, program: Program, device: Device) -> list[Section]:
    peak = peak_of(graph, program, device)
    if peak is None:
        return []
    shown = peak.consumers[:_CONSUMERS]
    rows = [(format_bytes(c.size_bytes), c.kind, c.name) for c in shown]
    rest = sum(c.size_bytes for c in peak.consumers[_CONSUMERS:])
    if rest:
        left = len(peak.consumers) - len(shown)
        rows.append((format_bytes(rest), "", counted(left, "other")))
    title = f"largest at the peak ({peak.where}, {peak.share:.0%} into the step)"
    return [Section(title, tuple(rows))]


def _recomputed(graph: Graph, program: Program) -> Section:
    extras = recomputed(graph, program)
    title = (
        f"recomputed: {counted(sum(one.count for one in extras), 'run')} of "
        f"{counted(graph.first_backward, 'forward operator')}, "
        f"{format_seconds(sum(one.time_s for one in extras))}"
    )
    rows = ((counted(one.count, "run"), format_seconds(one.time_s), one.module) for one in extras)
    return Section(title, tuple(rows))


def _stages(count: int, steps: tuple[ChainStep, ...]) -> Section:
    ranges = stage_runs(steps)
    rows = [
        (
            f"stage {first}" if first == last else f"stages {first}-{last}",
            "forward once" if runs == 1 else f"forward {runs} times",
        )
        for first, last, runs in ranges[:_RANGES]
    ]
    if len(ranges) > _RANGES:
        rows.append(("...", f"{counted(len(ranges) - _RANGES, 'more range')} of stages"))
    offloaded = offloaded_stages(steps)
    if offloaded:
        word = "stage" if len(offloaded) == 1 else "stages"
        rows.append(("offloaded", f"{word} {', '.join(map(str, offloaded))}"))
    return Section(f"chain of {counted(count, 'stage')}, the loss last", tuple(rows))


def _moved(graph: Graph, program: Program) -> Section:
    extras = moved(graph, program)
    count, size_bytes = sum(one.count for one in extras), sum(one.size_bytes for one in extras)
    rows = ((counted(x.count, "tensor"), format_bytes(x.size_bytes), x.module) for x in extras)
    title = f"moved to the host: {counted(count, 'tensor')}, {format_bytes(size_bytes)}"
    return Section(title, tuple(rows))
