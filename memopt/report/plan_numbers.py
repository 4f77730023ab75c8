"""A plan's figures for machines: bytes and seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.plan_record import BaselineFigures, PlanRecord


def plan_figures(plan: PlanRecord) -> dict[str, Any]:
    """Return a plan's figures for machines: bytes and seconds."""
    reserved = plan.reserved
    runs = [run.op for _, run in plan.program.computes]
    return {
        "strategy": plan.strategy.name,
        "parameters": repr(plan.strategy),
        "status": plan.status.value,
        "budget_bytes": plan.budget,
        "peak_bytes": plan.peak_bytes,
        "resident_bytes": plan.resident_bytes,
        "reserved_bytes": None if reserved is None else reserved.reserved_peak_bytes,
        "host_peak_bytes": plan.host_peak_bytes,
        "step_time_s": plan.step_time_s,
        "overhead": plan.overhead,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "baseline": baseline_figures(plan.baseline),
        "operators": len(plan.graph.operators),
        "recomputations": len(runs) - len(set(runs)),
        "model": None if plan.record is None else plan.record.model,
        "device": plan.device.name,
        "notes": list(plan.notes),
    }


def baseline_figures(baseline: BaselineFigures) -> dict[str, Any]:
    """Return the unplanned step's figures for machines."""
    return {
        "peak_bytes": baseline.peak_bytes,
        "step_time_s": baseline.step_time_s,
        "measured": baseline.measured,
    }
