"""A plan as text of at most 80 columns, and the same sections for other displays."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.report.peak import peak_of
from memopt.report.searched import searched
from memopt.report.texts import counted, format_seconds
from memopt.report.work import gathered, moved, offloaded_stages, recomputed, stage_runs

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord
from memopt.report.plan_figures import figures

WIDTH = 80
_CONSUMERS = 5
_RANGES = 8


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table of texts."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def sections(plan: PlanRecord) -> tuple[Section, ...]:
    """List the summary's sections: the figures first, under an empty title."""
    found = [
        Section("", figures(plan)),
        Section(*searched(plan.stats, plan.compute_time_s)),
        _peak(plan),
        _recomputed(plan),
        _gathered(plan),
        _stages(plan),
    ]
    return tuple(section for section in (*found, _moved(plan)) if section and section.rows)


def plan_summary(plan: PlanRecord) -> str:
    """Write the sections in aligned lines of at most 80 columns."""
    lines: list[str] = []
    for section in sections(plan):
        if section.title:
            lines += textwrap.wrap(section.title, WIDTH)
        lines += _aligned(section.rows, indent=2 if section.title else 0)
    for note in plan.notes:
        lines += textwrap.wrap(note, WIDTH)
    return "\n".join(lines)


def _aligned(rows: tuple[tuple[str, ...], ...], indent: int) -> list[str]:
    """Align rows in columns; the last column is wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *before, last in rows:
        cells = (text.ljust(width) for text, width in zip(before, widths, strict=False))
        start = " " * indent + "".join(f"{cell}  " for cell in cells)
        lines += textwrap.wrap(
            last, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
        ) or [start.rstrip()]
    return lines


def _peak(plan: PlanRecord) -> Section | None:
    peak = peak_of(plan.graph, plan.program, plan.device)
    if peak is None:
        return None
    shown = peak.consumers[:_CONSUMERS]
    rows = [(format_bytes(c.size_bytes), c.kind, c.name) for c in shown]
    rest = sum(c.size_bytes for c in peak.consumers[_CONSUMERS:])
    if rest:
        left = len(peak.consumers) - len(shown)
        rows.append((format_bytes(rest), "", counted(left, "other")))
    return Section(
        f"largest at the peak ({peak.where}, {peak.share:.0%} into the step)", tuple(rows)
    )


def _recomputed(plan: PlanRecord) -> Section | None:
    extras = recomputed(plan.graph, plan.program)
    runs = sum(extra.count for extra in extras)
    time_s = sum(extra.time_s for extra in extras)
    # A bare chain's graph also has operators that make its input and the loss's gradient.
    forward = len(plan.chain) if plan.is_of_chain and plan.chain else plan.graph.first_backward
    title = (
        f"recomputed: {counted(runs, 'run')} of {counted(forward, 'forward operator')}, "
        f"{format_seconds(time_s)}"
    )
    rows = [
        (counted(extra.count, "run"), format_seconds(extra.time_s), extra.module)
        for extra in extras
    ]
    return Section(title, tuple(rows))


def _gathered(plan: PlanRecord) -> Section | None:
    found = gathered(plan.graph, plan.program)
    again, time_s = sum(row.again for row in found), sum(row.time_s for row in found)
    total = again + sum(row.kept for row in found)
    rows = [(f"{row.kept} kept", f"{row.again} again", row.module) for row in found]
    title = f"gathered again: {again} of {counted(total, 'all-gather')}, {format_seconds(time_s)}"
    return Section(title, tuple(rows))


def _stages(plan: PlanRecord) -> Section | None:
    if plan.chain_steps is None or plan.chain is None:
        return None
    ranges = stage_runs(plan.chain_steps)
    rows = [
        (
            f"stage {first}" if first == last else f"stages {first}-{last}",
            "forward once" if runs == 1 else f"forward {runs} times",
        )
        for first, last, runs in ranges[:_RANGES]
    ]
    if len(ranges) > _RANGES:
        rows.append(("...", f"{counted(len(ranges) - _RANGES, 'more range')} of stages"))
    offloaded = offloaded_stages(plan.chain_steps)
    if offloaded:
        rows.append(
            (
                "offloaded",
                f"{'stage' if len(offloaded) == 1 else 'stages'} {', '.join(map(str, offloaded))}",
            )
        )
    return Section(f"chain of {counted(len(plan.chain), 'stage')}, the loss last", tuple(rows))


def _moved(plan: PlanRecord) -> Section | None:
    extras = moved(plan.graph, plan.program)
    count, size = sum(e.count for e in extras), sum(e.size_bytes for e in extras)
    rows = [(counted(e.count, "tensor"), format_bytes(e.size_bytes), e.module) for e in extras]
    return Section(
        f"moved to the host: {counted(count, 'tensor')}, {format_bytes(size)}", tuple(rows)
    )
