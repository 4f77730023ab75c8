"""A plan as text of at most 80 columns, and the same sections as tables for notebooks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.models.chain_html import html_table
from memopt.models.status import Status
from memopt.programs.allocator_settings import EXPANDABLE, AllocatorSettings
from memopt.programs.moved import carried_over, updates_on_host
from memopt.programs.network_use import network_use
from memopt.programs.replay import replay
from memopt.report.peak import peak_of
from memopt.report.style import BLUE, GREY, VERMILION
from memopt.report.texts import counted, format_seconds
from memopt.report.work import gathered, moved, offloaded_stages, recomputed, stage_runs

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

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


_LOOSE = 1.1
"""Reserved over allocated bytes from which a summary says how to lower them."""


def figures(plan: PlanRecord) -> tuple[tuple[str, ...], ...]:
    """List (name, value and remarks) of each figure."""
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
        *_reserved(plan),
        ("baseline peak", f"{format_bytes(plan.baseline.peak_bytes)} ({kind})"),
        (
            "step time",
            f"{format_seconds(plan.step_time_s)} predicted, {plan.overhead:+.1%} over running "
            "every operator once",
        ),
        ("baseline time", f"{format_seconds(plan.baseline.step_time_s)} ({kind})"),
        ("bound", f"{format_seconds(plan.lower_bound_s)}, gap {plan.gap:.2%}"),
    ]
    if plan.graph.network_time_s:
        used = network_use(replay(plan.graph, plan.program, plan.device))
        rows.append(
            ("network", f"{format_seconds(used.time_s)} of collectives, {used.hidden:.0%} hidden")
        )
    if plan.host_peak_bytes:
        rows.append(("host memory", f"{format_bytes(plan.host_peak_bytes)} for swapped tensors"))
    if updates_on_host(plan.graph, plan.program):
        rows.append(_on_host(plan))
    if plan.graph.repeated:
        rows.append(_repeated(plan))
    return (*rows, *_passes(plan.stats))


def _on_host(plan: PlanRecord) -> tuple[str, str]:
    updates = replay(plan.graph, plan.program, plan.device).host_updates
    time_s = sum(one.end_s - one.start_s for one in updates)
    return "on the host", f"{len(updates)} updates, {format_seconds(time_s)}"


def _repeated(plan: PlanRecord) -> tuple[str, str]:
    tensors = carried_over(plan.graph, plan.program)
    size = format_bytes(sum(plan.graph.tensors[t].size_bytes for t in tensors))
    count = counted(len(tensors), "updated tensor")
    return "repeated", f"{count}, {size}, on the device from one step to the next"


def _reserved(plan: PlanRecord) -> list[tuple[str, str]]:
    """Give the bytes that CUDA's allocator reserves, as simulated."""
    found = plan.reserved
    if found is None:
        return []
    limited = ", which the budget limits" if plan.reserved_bytes_limited else ""
    grows = AllocatorSettings.of_environment().expandable_segments
    if not grows and found.reserved_peak_bytes > _LOOSE * found.allocated_peak_bytes:
        limited += f"; less with {EXPANDABLE}"
    return [
        (
            "reserved",
            f"{format_bytes(found.reserved_peak_bytes)} by the simulated CUDA allocator for "
            f"{format_bytes(found.allocated_peak_bytes)} allocated{limited}",
        )
    ]


def _passes(stats: Mapping[str, object]) -> list[tuple[str, str]]:
    """Give the effect of reordering and placement, from the passes' and OLLA's statistics."""
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


def searched(
    stats: Mapping[str, object], compute_time_s: float
) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return a title and a row for each member that was asked: (name, seconds spent, step time over
    running every operator once or why there is no plan). No rows if the search was not auto's."""
    rows = tuple(
        row for key in ("tried", "at_once") for row in _rows(stats.get(key), compute_time_s)
    )
    spent_s = stats.get("solve_s")
    took = f" in {format_seconds(spent_s)}" if isinstance(spent_s, float) else ""
    lines = [f"tried: {len(rows)} of auto's strategies{took}"]
    ended, left = stats.get("ended"), stats.get("not_tried")
    if ended:
        lines.append(f"ended: {ended}")
    if isinstance(left, Sequence) and left and not isinstance(left, str):
        lines.append(f"not tried: {', '.join(map(str, left))}")
    if stats.get("reason"):
        lines.append(str(stats["reason"]))
    return "; ".join(lines), rows


def _rows(lines: object, compute_time_s: float) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a search's outcomes (`MemberOutcome.line`), also as a file has them."""
    if not isinstance(lines, Sequence) or isinstance(lines, str):
        return
    for line in lines:
        match line:
            case [str(name), str(status), float(time_s), float(seconds), str()]:
                over = f"{time_s / compute_time_s - 1:+.1%}" if compute_time_s > 0 else status
                yield name, format_seconds(seconds), over
            case [str(name), str(status), None, float(seconds), str(note)]:
                proved = "no plan: proved" if status == Status.INFEASIBLE else "no plan"
                yield name, format_seconds(seconds), note or proved


def plan_html(plan: PlanRecord) -> str:
    """Write the summary as HTML, with bars for the plan's peak, the budget and the baseline's.
    Everything is escaped; there is no script."""
    first, *others = sections(plan)
    parts = ["<div>", f"<b>memopt plan</b> ({escape(plan.strategy.name)})", _bars(plan)]
    parts.append(html_table(first.rows))
    parts += [
        f"<details><summary>{escape(section.title)}</summary>{html_table(section.rows)}</details>"
        for section in others
    ]
    parts += [f"<p>{escape(note)}</p>" for note in plan.notes]
    return "\n".join([*parts, "</div>"])


def _bars(plan: PlanRecord) -> str:
    largest = max(plan.peak_bytes, plan.baseline.peak_bytes, plan.budget or 0, 1)
    bars = [("peak", plan.peak_bytes, BLUE), ("baseline", plan.baseline.peak_bytes, GREY)]
    if plan.budget is not None:
        bars.insert(1, ("budget", plan.budget, VERMILION))
    rows = [
        f'<tr><td style="text-align:left">{name}</td><td style="text-align:left">'
        f'<div style="background:{color};height:0.7em;width:{16 * size / largest:.2f}em"></div>'
        "</td></tr>"
        for name, size, color in bars
    ]
    return f"<table>{''.join(rows)}</table>"
