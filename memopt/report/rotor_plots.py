"""Pictures of chain schedules: what runs and what is held (Rotor figure 2), memory, trade-offs.

Every function draws on `ax` (a new figure's if None) and returns it. Colours are Okabe and Ito's,
told apart by colour-blind readers; forward and backward also differ in hatching.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from memopt.models.chain import Chain
from memopt.models.chain_replay import ChainState, replay_chain
from memopt.models.steps import ChainStep, Move
from memopt.strategies.rotor.curve import CurvePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20

MOVE_STYLES: Mapping[Move, tuple[str, str, str]] = {
    Move.FORWARD_NO_SAVE: ("#56B4E9", "", "F∅: forward, input dropped"),
    Move.FORWARD_CHECKPOINT: ("#0072B2", "", "Fck: forward, input kept"),
    Move.FORWARD_ALL: ("#009E73", "", "Fall: forward, everything saved"),
    Move.BACKWARD: ("#D55E00", "//", "B: backward"),
}
ACTIVATION_COLOUR, SAVED_COLOUR, LINE_COLOUR = "#BDD7E7", "#B5DDCF", "#000000"
CURVE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv*x"


def plot_schedule(chain: Chain, steps: Iterable[ChainStep], ax: Axes | None = None) -> Axes:
    """Steps over time, one row a stage, and behind them what each row's stage holds.

    Pale blue: a^ℓ is in memory on its own; pale green: ā^ℓ is. A step that takes no time is a
    thin line.
    """
    axes = _axes(ax)
    state = ChainState(chain)
    held: dict[tuple[str, int], float] = {}
    now = 0.0
    shown: set[Move] = set()
    for step in steps:
        begin = now
        _, seconds = state.apply(step)
        now += seconds
        if step.move in MOVE_STYLES:
            colour, hatch, label = MOVE_STYLES[step.move]
            axes.barh(
                step.stage,
                seconds,
                left=begin,
                height=0.5,
                color=colour,
                hatch=hatch,
                edgecolor=LINE_COLOUR,
                linewidth=0.4,
                label=None if step.move in shown else label,
                zorder=3,
            )
            shown.add(step.move)
        values = {("a", k) for k in state.activations} | {("ā", k) for k in state.saved}
        for value in values - held.keys():
            held[value] = now
        for value in held.keys() - values:
            _held_bar(axes, value, held.pop(value), now)
    for value, since in held.items():
        _held_bar(axes, value, since, now)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("stage (0 is the chain's input)")
    axes.set_ylim(-0.6, len(chain) + 0.6)
    axes.legend(loc="upper right", fontsize="small")
    return axes


def _held_bar(axes: Axes, value: tuple[str, int], since: float, until: float) -> None:
    kind, stage = value
    colour = ACTIVATION_COLOUR if kind == "a" else SAVED_COLOUR
    axes.barh(stage, until - since, left=since, height=0.9, color=colour, zorder=1)


def plot_memory(
    chain: Chain,
    steps: Iterable[ChainStep],
    budget_bytes: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Memory during each step over time, in MiB, resident bytes included; the budget dashed."""
    axes = _axes(ax)
    steps = tuple(steps)
    timeline = replay_chain(chain, steps)
    state = ChainState(chain)
    edges = [0.0]
    for step in steps:
        edges.append(edges[-1] + state.apply(step)[1])
    memory = [during / MIB for during in timeline.step_bytes]
    axes.stairs(memory, edges, fill=True, color=CURVE_COLOURS[5], label="memory during the step")
    if budget_bytes is not None:
        budget = budget_bytes / MIB
        axes.axhline(budget, color=LINE_COLOUR, linestyle="--", label="budget")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("memory (MiB)")
    axes.legend(loc="lower right", fontsize="small")
    return axes


def plot_curves(
    curves: Mapping[str, Iterable[CurvePoint]], least_time_s: float, ax: Axes | None = None
) -> Axes:
    """Step time, as a multiple of `least_time_s` (no recomputation), against peak memory in MiB.

    Args:
        curves: name → trade-off, for example {"rotor": Rotor().curve(chain)}.
        least_time_s: `chain.compute_time_s`.
        ax: where to draw.
    """
    axes = _axes(ax)
    for number, (name, points) in enumerate(curves.items()):
        ordered = sorted(points, key=lambda point: point.peak_bytes)
        axes.step(
            [point.peak_bytes / MIB for point in ordered],
            [point.time_s / least_time_s for point in ordered],
            where="post",
            color=CURVE_COLOURS[number % len(CURVE_COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=3,
            label=name,
        )
    axes.set_xlabel("peak memory (MiB)")
    axes.set_ylabel("step time / step time without recomputation")
    axes.legend(fontsize="small")
    return axes


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    axes: Axes = Figure(figsize=(8, 4), layout="constrained").subplots()
    return axes
