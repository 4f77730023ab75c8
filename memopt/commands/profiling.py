"""`memopt profile`: what a training step costs, operator by operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import memopt
from memopt.commands import options
from memopt.commands.output import say, say_json, say_written, table
from memopt.files.envelope import write_atomically
from memopt.models.budget import format_bytes
from memopt.models.graph import Graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps
from memopt.report.texts import format_seconds


@options.with_model_options
def profile(
    model: options.ModelOptions,
    out: Annotated[Path | None, typer.Option(help="Save the graph here (JSON).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many operators to list.")] = 10,
) -> None:
    """Measure what a model's training step costs, operator by operator."""
    options.check_outputs({"--out": out})
    graph = memopt.profile(**model.arguments())
    if out is not None:
        write_atomically(out, dumps(graph))
    figures = _figures(graph, top)
    if model.as_json:
        say_json(figures)
    elif not model.quiet:
        _print(figures)
        say_written(out)


def _figures(graph: Graph, top: int) -> dict[str, Any]:
    """Return figures of the step and of its kernels, sorted by their total time, longest first."""
    kernels: dict[str, dict[str, Any]] = {}
    for operator in graph.operators:
        name = operator.target or operator.name
        blank = {"name": name, "calls": 0, "time_s": 0.0, "workspace_bytes": 0}
        kernel = kernels.setdefault(name, blank)
        kernel["calls"] += 1
        kernel["time_s"] += operator.time_s
        kernel["workspace_bytes"] = max(kernel["workspace_bytes"], operator.workspace_bytes)
    timeline = replay(graph, store_all(graph))
    return {
        "operators": len(graph.operators),
        "tensors": len(graph.tensors),
        "resident_bytes": graph.resident_bytes,
        "peak_bytes": timeline.peak_bytes,
        "step_time_s": timeline.time_s,
        "kernels": sorted(kernels.values(), key=lambda kernel: -kernel["time_s"])[:top],
    }


def _print(figures: dict[str, Any]) -> None:
    say(f"{figures['operators']} operators, {format_seconds(figures['step_time_s'])}")
    say(
        f"peak {format_bytes(figures['peak_bytes'])} in the model's own order, of which "
        f"{format_bytes(figures['resident_bytes'])} never move"
    )
    total = figures["step_time_s"] or 1.0
    table(
        ("kernel", "calls", "time", "share", "workspace"),
        [
            (
                kernel["name"],
                str(kernel["calls"]),
                format_seconds(kernel["time_s"]),
                f"{kernel['time_s'] / total:.0%}",
                format_bytes(kernel["workspace_bytes"]),
            )
            for kernel in figures["kernels"]
        ],
    )
