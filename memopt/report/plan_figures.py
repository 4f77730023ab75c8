"""The figures at the head of a plan's summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.programs.allocator_settings import EXPANDABLE, AllocatorSettings
from memopt.programs.moved import carried_over, updates_on_host
from memopt.programs.network_use import network_use
from memopt.programs.replay import replay
from memopt.report.texts import counted, format_seconds

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

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
        rows.append(_network(plan))
    if plan.host_peak_bytes:
        rows.append(("host memory", f"{format_bytes(plan.host_peak_bytes)} for swapped tensors"))
    if updates_on_host(plan.graph, plan.program):
        rows.append(_on_host(plan))
    if plan.graph.repeated:
        rows.append(_repeated(plan))
    return (*rows, *_passes(plan.stats))


def _network(plan: PlanRecord) -> tuple[str, str]:
    used = network_use(replay(plan.graph, plan.program, plan.device))
    return "network", f"{format_seconds(used.time_s)} of collectives, {used.hidden:.0%} hidden"


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
