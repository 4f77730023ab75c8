"""The page's three figures, empty: memopt's page.js fills them from the page's data.

They are Bokeh's: drawn on a canvas, which is quick for thousands of operators, and updated by the
script without any `eval`, which the page's own policy forbids. Bokeh gets no name from the user;
legends and texts are the page's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from memopt.report.memory_plot import COLORS as LAYER_COLORS
from memopt.report.rotor_plots import CURVE_COLOURS
from memopt.report.schedule_plot import AGAIN
from memopt.report.style import GREY, VERMILION
from memopt.report.timeline_plot import COLORS as SPAN_COLORS

MISSING = "a report needs bokeh, which is not installed: pip install bokeh"
MOST_LAYERS = 10
"""How many layers the memory stack has at most: kinds of tensors, or modules and a rest."""
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "star", "x")
"""Bokeh's names of the plots' markers, in matplotlib "os^Dv*x"."""
_HEIGHTS = {"curve": 330, "memory": 430, "streams": 190}
_LEFT = 84
"""Pixels left of both figures of the step, so that their time axes agree."""


def colors() -> dict[str, Any]:
    """Return the plots' colours: of memory layers, of spans, and of the curves in turn."""
    return {
        "layers": dict(LAYER_COLORS),
        "spans": dict(SPAN_COLORS),
        "curves": list(CURVE_COLOURS),
        "budget": VERMILION,
        "rest": GREY,
    }


@cache
def figure_items(memory_name: str, time_name: str, step_axis: str) -> dict[str, Any]:
    """Make Bokeh's JSON of the figures: "curve", and "step" (memory above streams, one time axis).

    Raises:
        ImportError: bokeh is missing; names the extra to install.
    """
    try:
        from bokeh.embed import json_item
        from bokeh.layouts import column
        from bokeh.models import Range1d
    except ImportError as error:
        raise ImportError(MISSING) from error
    shared = Range1d(start=0, end=1, name="time", bounds=(0, None))
    memory = _memory(shared, memory_name)
    streams = _streams(shared, step_axis)
    step = column(memory, streams, sizing_mode="stretch_width", name="step")
    return {
        "curve": json_item(_curve(memory_name, time_name)),
        "step": json_item(step),
    }


def _new(name: str, tools: str, **more: Any) -> Any:
    from bokeh.plotting import figure

    made = figure(
        name=name,
        height=_HEIGHTS[name],
        sizing_mode="stretch_width",
        tools=tools,
        active_scroll=None,
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        **more,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.grid.grid_line_alpha = 0.35
    made.axis.minor_tick_line_color = None
    made.axis.axis_label_text_font_style = "normal"
    return made


def _curve(memory_name: str, time_name: str) -> Any:
    """Make the plot of step time against peak memory: shaded bounds, lines, points, and a ring
    around the opened plan."""
    from bokeh.models import ColumnDataSource, DataRange1d
    from bokeh.models.annotations import Span

    made = _new("curve", "pan,wheel_zoom,box_zoom,reset")
    made.xaxis.axis_label = f"peak memory ({memory_name})"
    made.yaxis.axis_label = f"step time ({time_name})"
    # The bound's shading reaches the frame's edges, and must not widen the axes.
    points: list[Any] = []
    bound = ColumnDataSource({"left": [], "right": [], "top": [], "bottom": []}, name="bound")
    made.quad("left", "right", "top", "bottom", source=bound, color=GREY, alpha=0.3, line_width=0)
    for number in range(len(CURVE_COLOURS) * 3):
        color = CURVE_COLOURS[number % len(CURVE_COLOURS)]
        dash = ("solid", "dashed", "dotted")[number // len(CURVE_COLOURS)]
        line = ColumnDataSource({"x": [], "y": []}, name=f"line{number}")
        width = max(1.2, 3.0 - 0.4 * number)
        made.line("x", "y", source=line, color=color, line_dash=dash, line_width=width)
        marker = MARKERS[number % len(MARKERS)]
        size = max(6, 11 - number)
        points.append(made.scatter("x", "y", source=line, marker=marker, size=size, color=color))
    for name, marker, size in (("baseline", "star", 16), ("measured", "asterisk", 12)):
        source = ColumnDataSource({"x": [], "y": []}, name=name)
        points.append(
            made.scatter("x", "y", source=source, marker=marker, size=size, name=f"{name} mark")
        )
    ring = ColumnDataSource({"x": [], "y": []}, name="ring")
    made.scatter("x", "y", source=ring, size=20, fill_color=None, line_width=2.5, name="ring mark")
    for span, dash in (("budget of the curve", "dashed"), ("capacity", "solid")):
        limit = Span(name=span, dimension="height", line_color=VERMILION, line_dash=dash)
        limit.visible = False
        made.add_layout(limit)
    made.x_range = DataRange1d(renderers=points, range_padding=0.06)
    made.y_range = DataRange1d(renderers=points, range_padding=0.12)
    return made


def _memory(shared: Any, memory_name: str) -> Any:
    """Make the memory plot: stack, budget, peak, measured peak and the baseline's memory."""
    from bokeh.models import ColumnDataSource, Range1d
    from bokeh.models.annotations import Span

    tools = "xpan,xwheel_zoom,xbox_zoom,reset"
    made = _new("memory", tools, x_range=shared, y_range=Range1d(start=0, end=1, name="bytes"))
    made.min_border_left = _LEFT
    made.yaxis.axis_label = f"device memory ({memory_name})"
    made.xaxis.visible = False
    empty: dict[str, list[float]] = {f"l{number}": [] for number in range(MOST_LAYERS + 1)}
    stack = ColumnDataSource({"x": [], **empty}, name="stack")
    for number in range(MOST_LAYERS):
        made.varea_step(
            "x",
            f"l{number}",
            f"l{number + 1}",
            step_mode="after",
            source=stack,
            name=f"layer{number}",
            visible=False,
        )
    other = ColumnDataSource({"x": [], "y": []}, name="other")
    made.step("x", "y", mode="after", source=other, line_width=1.2, name="other line")
    for name, dash, color in (
        ("budget", "dashed", VERMILION),
        ("measured peak", "dotdash", VERMILION),
    ):
        made.add_layout(
            Span(name=name, dimension="width", line_color=color, line_dash=dash, line_width=1.6)
        )
    made.add_layout(Span(name="backward", dimension="height", line_dash="dotted", line_width=1))
    mark = ColumnDataSource({"x": [], "y": []}, name="peak")
    made.scatter("x", "y", source=mark, marker="inverted_triangle", size=11, name="peak mark")
    return made


def _streams(shared: Any, step_axis: str) -> Any:
    """Make the plot of the lanes: spans by kind; those of recomputation are hatched."""
    from bokeh.models import ColumnDataSource, FixedTicker, Range1d

    tools = "xpan,xwheel_zoom,xbox_zoom,reset"
    made = _new(
        "streams", tools, x_range=shared, y_range=Range1d(start=3.5, end=-0.5, name="lanes")
    )
    made.min_border_left = _LEFT
    made.xaxis.axis_label = step_axis
    made.yaxis.ticker = FixedTicker(ticks=[], name="lane ticks")
    made.ygrid.visible = False
    for kind, color in SPAN_COLORS.items():
        empty: dict[str, list[float]] = {"left": [], "right": [], "top": [], "bottom": []}
        source = ColumnDataSource(empty, name=f"spans {kind}")
        hatch = {"hatch_pattern": "/", "hatch_color": "white", "hatch_alpha": 0.7}
        made.quad(
            "left",
            "right",
            "top",
            "bottom",
            source=source,
            color=color,
            line_width=0,
            **({"hatch_scale": 8, "hatch_weight": 1, **hatch} if kind == AGAIN else {}),
        )
    return made
