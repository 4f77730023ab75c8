"""Pictures of chain schedules: steps and stored values (Rotor figure 2).

Every function draws on `ax` (None: a new figure's) and returns it. Forward and backward differ
in hatching too, curves in markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from memopt.models.chain import Chain
from memopt.models.steps import ChainStep, Move
from memopt.reductions.chain_replay import ChainState
from memopt.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOVE_STYLES: Mapping[Move, tuple[str, str, str]] = {
    Move.FORWARD_NO_SAVE: (SKY, "", "F∅: forward, input dropped"),
    Move.FORWARD_CHECKPOINT: (BLUE, "", "Fck: forward, input kept"),
    Move.FORWARD_ALL: (GREEN, "", "Fall: forward, everything saved"),
    Move.BACKWARD: (VERMILION, "//", "B: backward"),
}
HELD_OPACITY = 0.3
CURVE_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)


def plot_schedule(chain: Chain, steps: Iterable[ChainStep], ax: Axes | None = None) -> Axes:
    """Draw the steps over time, a row per stage, and behind them the values that the stage holds.

    Pale blue: a^ℓ is in memory on its own; pale green: ā^ℓ is. A step that takes no time is a
    thin line.
    """
    axes = new_axes(ax)
    state = ChainState(chain)
    held = {("a", 0): 0.0}
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
                edgecolor=GREY,
                linewidth=0.4,
                label=None if step.move in shown else label,
                zorder=3,
            )
            shown.add(step.move)
        values = {("a", k) for k in state.activations} | {("ā", k) for k in state.saved}
        for value in sorted(values - held.keys()):
            held[value] = now
        for value in sorted(held.keys() - values):
            _held_bar(axes, value, held.pop(value), now)
    for value, since in held.items():
        _held_bar(axes, value, since, now)
    axes.set(xlabel="time (s)", ylabel="stage (0 is the chain's input)")
    axes.set_ylim(-0.6, len(chain) + 0.6)
    axes.legend(loc="upper right", fontsize="small")
    return axes


def _held_bar(axes: Axes, value: tuple[str, int], since: float, until: float) -> None:
    kind, stage = value
    colour = SKY if kind == "a" else GREEN
    width = until - since
    axes.barh(stage, width, left=since, height=0.9, color=colour, alpha=HELD_OPACITY, zorder=1)
