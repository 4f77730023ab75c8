"""`memopt profile`: what a training step costs, operator by operator."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

import memopt
from memopt.commands import options
from memopt.commands.output import say, say_json, table
from memopt.files.envelope import write_atomically
from memopt.models.budget import format_bytes
from memopt.models.graph import Graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps
from memopt.report.texts import format_seconds


def profile(
    model: options.Model,
    out: Annotated[Path | None, typer.Option(help="Save the graph here (JSON).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many operators to list.")] = 10,
    device: options.Device = None,
    mode: options.Mode = "measure",
    optimizer: options.Optimizer = None,
    batch: options.Batch = 4,
    sequence: options.Sequence = 128,
    cache: options.Cache = True,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what a model's training step costs, operator by operator."""
    graph = memopt.profile(
        **options.priced(model, device, mode, optimizer, cache, batch, sequence),
        progress=not (as_json or quiet),
    )
    if out is not None:
        write_atomically(out, dumps(graph))
    if as_json:
        say_json(_figures(graph, top))
    elif not quiet:
        _print(graph, top)
        if out is not None:
            say(f"wrote {out}")


def _by_target(graph: Graph) -> list[tuple[str, int, float, int]]:
    """(kernel, calls, seconds in all, largest workspace), most expensive first."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    workspace: dict[str, int] = defaultdict(int)
    for operator in graph.operators:
        name = operator.target or operator.name
        calls[name] += 1
        seconds[name] += operator.time_s
        workspace[name] = max(workspace[name], operator.workspace_bytes)
    names = sorted(calls, key=lambda name: -seconds[name])
    return [(name, calls[name], seconds[name], workspace[name]) for name in names]


def _figures(graph: Graph, top: int) -> dict[str, object]:
    timeline = replay(graph, store_all(graph))
    return {
        "operators": len(graph.operators),
        "tensors": len(graph.tensors),
        "resident_bytes": graph.resident_bytes,
        "peak_bytes": timeline.peak_bytes,
        "step_time_s": timeline.time_s,
        "kernels": [
            {"name": name, "calls": calls, "time_s": seconds, "workspace_bytes": workspace}
            for name, calls, seconds, workspace in _by_target(graph)[:top]
        ],
    }


def _print(graph: Graph, top: int) -> None:
    timeline = replay(graph, store_all(graph))
    say(f"{len(graph.operators)} operators, {format_seconds(timeline.time_s)}")
    say(
        f"peak {format_bytes(timeline.peak_bytes)} in the model's own order, of which "
        f"{format_bytes(graph.resident_bytes)} never move"
    )
    total = timeline.time_s or 1.0
    table(
        ("kernel", "calls", "time", "share", "workspace"),
        [
            (
                name,
                str(calls),
                format_seconds(seconds),
                f"{seconds / total:.0%}",
                format_bytes(workspace),
            )
            for name, calls, seconds, workspace in _by_target(graph)[:top]
        ],
    )
