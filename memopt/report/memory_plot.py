"""Plot of memory over the step: the plan, stacked by kind of tensor; the baseline; the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.programs.liveness import store_all
from memopt.report.memory_profile import (
    ACTIVATIONS,
    GRADIENTS,
    OUTPUTS,
    PARAMETERS,
    RESIDENT,
    WORKSPACE,
    MemoryProfile,
    program_profile,
)
from memopt.report.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    legend_beside,
    memory_unit,
    new_axes,
    text_color,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memopt.plan_record import PlanRecord

COLORS = {
    PARAMETERS: BLUE,
    RESIDENT: SKY,
    ACTIVATIONS: ORANGE,
    OUTPUTS: YELLOW,
    GRADIENTS: GREEN,
    WORKSPACE: PURPLE,
}


def profiles(plan: PlanRecord) -> tuple[MemoryProfile, MemoryProfile]:
    """Return the memory of the plan, and that of the model's own order with nothing recomputed."""
    own = program_profile(plan.graph, store_all(plan.graph), plan.device)
    return program_profile(plan.graph, plan.program, plan.device), own


def plot_memory(plan: PlanRecord, ax: Axes | None = None) -> Axes:
    """Draw the plan's memory; the baseline is the replay of the model's own order."""
    ax = new_axes(ax)
    planned, own = profiles(plan)
    largest = max(*planned.total_bytes, *own.total_bytes, plan.budget or 0)
    longest_s = max(planned.end_s, own.end_s)
    unit, unit_name = memory_unit(largest)
    scale, time_name = time_unit(longest_s)
    in_steps = longest_s <= 0

    times = _times(planned, scale, in_steps)
    base = [0.0] * len(times)
    for name, values in planned.layers.items():
        if not any(values):
            continue
        top = [b + v / unit for b, v in zip(base, [*values, values[-1]], strict=True)]
        ax.fill_between(times, base, top, step="post", color=COLORS[name], label=name, linewidth=0)
        base = top
    own_values = [value / unit for value in own.total_bytes]
    ax.step(
        _times(own, scale, in_steps),
        [*own_values, own_values[-1]],
        where="post",
        color=text_color(),
        linewidth=1.0,
        label=f"nothing recomputed,\npeak {format_bytes(max(own.total_bytes))}",
    )
    if plan.budget is not None:
        ax.axhline(
            plan.budget / unit,
            color=VERMILION,
            linestyle="--",
            linewidth=1.4,
            label=f"budget {format_bytes(plan.budget)}",
        )
    _mark_backward(ax, planned, scale, in_steps)
    ax.set_xlim(0, max(times[-1], _times(own, scale, in_steps)[-1]))
    ax.set_ylim(0, 1.08 * largest / unit)
    ax.set_xlabel("instruction" if in_steps else f"time in the step, predicted ({time_name})")
    ax.set_ylabel(f"device memory ({unit_name})")
    ax.set_title(f"{plan.strategy.name}: peak {format_bytes(plan.peak_bytes)}", loc="left")
    legend_beside(ax)
    return ax


def _times(profile: MemoryProfile, scale: float, in_steps: bool) -> list[float]:
    if in_steps:
        return [float(i) for i in range(len(profile.start_s) + 1)]
    return [scale * s for s in (*profile.start_s, profile.end_s)]


def _mark_backward(ax: Axes, profile: MemoryProfile, scale: float, in_steps: bool) -> None:
    """Draw a thin line where the plan's backward starts."""
    if profile.backward_s is None or in_steps:
        return
    x = scale * profile.backward_s
    ax.axvline(x, color=text_color(), linewidth=0.8, linestyle=":")
    for text, side, offset in (("forward", "right", -4), ("backward", "left", 4)):
        ax.annotate(
            text,
            (x, 1.0),
            (offset, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize="small",
        )
