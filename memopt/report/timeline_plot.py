"""Plot of a plan's streams: compute, copies to the host, copies back, the network, the host; and
of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memopt.report.lanes import Lane, predicted_lanes
from memopt.report.memory_plot import plot_memory
from memopt.report.schedule_plot import (
    AGAIN,
    BACKWARD,
    FORWARD,
    UPDATE,
    plot_schedule,
    program_bars,
)
from memopt.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    legend_beside,
    new_axes,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memopt.plan_record import PlanRecord


LANES = ("compute", "device → host", "host → device", "network", "host")
_WAIT, _OUT, _IN, _NETWORK = "waiting", "to host", "from host", "collectives"
_HOST = "updates on the host"
_OF_LANE = dict(zip(Lane, (_WAIT, _OUT, _IN, _NETWORK, _HOST), strict=True))
COLORS = {
    FORWARD: BLUE,
    AGAIN: VERMILION,
    BACKWARD: GREEN,
    UPDATE: PURPLE,
    _WAIT: GREY,
    _OUT: ORANGE,
    _IN: SKY,
    _NETWORK: YELLOW,
    _HOST: PURPLE,
}


def plot_timeline(plan: PlanRecord, ax: Axes | None = None) -> Axes:
    """Draw the compute stream with its waits, both copy streams and, if there are any, the
    collectives and the host's updates."""
    spans = lanes(plan)
    used = [n for n in range(len(LANES)) if n < 3 or spans[(_NETWORK, _HOST)[n - 3]][1]]
    ax = new_axes(ax, 2.2)
    longest_s = plan.step_time_s
    scale, unit = time_unit(longest_s)
    for kind, (lane, found) in spans.items():
        if found:
            ax.broken_barh(
                [(scale * start, scale * duration) for start, duration in found],
                (used.index(lane) - 0.38, 0.76),
                color=COLORS[kind],
                linewidth=0,
                label=kind,
            )
    drawn = [LANES[lane] for lane in used]
    ax.set_yticks(range(len(drawn)), drawn)
    ax.set_ylim(len(drawn) - 0.5, -0.5)
    ax.set_xlim(0, scale * longest_s or 1.0)
    ax.set_xlabel(f"time in the step, predicted ({unit})")
    ax.set_title(f"{plan.strategy.name}: compute and copies", loc="left")
    legend_beside(ax)
    return ax


def lanes(plan: PlanRecord) -> dict[str, tuple[int, list[tuple[float, float]]]]:
    """Map each kind of bar to its lane and the (start, duration) of every bar, seconds."""
    _, bars = program_bars(plan.graph, plan.program, plan.device)
    spans = {kind: (0, [(s, d) for _, s, d in bars[kind] if d > 0]) for kind in bars}
    spans |= {kind: (number, []) for number, kind in enumerate(_OF_LANE.values())}
    for span in predicted_lanes(plan).spans:
        if span.stall or span.lane is not Lane.COMPUTE:
            spans[_OF_LANE[span.lane]][1].append((span.start_s, span.end_s - span.start_s))
    return spans


_KINDS: dict[str, Callable[[PlanRecord, Axes | None], Axes]] = {
    "memory": plot_memory,
    "schedule": plot_schedule,
    "timeline": plot_timeline,
}


def plot_plan(plan: PlanRecord, kind: str = "memory", ax: Axes | None = None) -> Axes:
    """Draw a plan; see `Plan.plot`."""
    if kind not in _KINDS:
        raise ValueError(f"there is no plot {kind!r} of a plan; there are {', '.join(_KINDS)}")
    return _KINDS[kind](plan, ax)
