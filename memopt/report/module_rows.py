"""The memory and time that a plan costs in each of the user's modules: paths such as
`encoder.layers.3.attn`, cut short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph, TensorKind
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.replay import replay

OUTSIDE = "(model)"
"""The group of operators outside any sub-module."""


def group_of(path: str, depth: int) -> str:
    """Return the first `depth` names of a module path."""
    return ".".join(path.split(".")[:depth]) if path else OUTSIDE


def depth_for(paths: Iterable[str], most: int) -> int:
    """Return the largest depth (at least 1) that gives at most `most` groups."""
    distinct = set(paths)
    deepest = max((path.count(".") + 1 for path in distinct), default=1)
    best = 1
    for depth in range(1, deepest + 1):
        if len({group_of(path, depth) for path in distinct}) <= most:
            best = depth
    return best


@dataclass
class ModuleRow:
    """One module, or several under one path. Bytes on the device unless said otherwise.

    Attributes:
        parameter_bytes: its parameters.
        kept_bytes: its results that are live when the backward starts, or at the end of a step
            without one.
        peak_bytes: its tensors and workspace in memory at the peak, beside what is always resident.
        runs: how often its operators run again.
        time_s: seconds of these runs, which the plan adds to the step.
        moved_bytes: bytes copied to the host.
    """

    parameter_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    runs: int = 0
    time_s: float = 0.0
    moved_bytes: int = 0


def module_rows(
    graph: Graph,
    program: Program,
    device: Device | None,
    groups: int,
    group_of_tensor: Sequence[int],
    group_of_operator: Sequence[int],
) -> tuple[ModuleRow, ...]:
    """Make a row for each group of modules.

    All `peak_bytes` and the resident bytes add up to the program's peak; runs and times, to those
    of `memopt.report.work.recomputed`; moved bytes, to those of `moved`."""
    rows = tuple(ModuleRow() for _ in range(groups))
    sizes = [tensor.size_bytes for tensor in graph.tensors]
    for tensor in graph.resident:
        if graph.tensors[tensor].kind is TensorKind.PARAMETER:
            rows[group_of_tensor[tensor]].parameter_bytes += sizes[tensor]
    ran: set[int] = set()
    for _, run in program.computes:
        if run.op in ran:
            row = rows[group_of_operator[run.op]]
            row.runs += 1
            row.time_s += variant(graph.operators[run.op], run.implementation).time_s
        ran.add(run.op)
    for instruction in program:
        for tensor in instruction.effects(graph).host_begins:
            rows[group_of_tensor[tensor]].moved_bytes += sizes[tensor]
    peak = replay(graph, program, device).peak_instruction
    start = len(program) if program.boundary is None else program.boundary
    for lifetime in lifetimes(graph, program).device:
        row = rows[group_of_tensor[lifetime.tensor]]
        if lifetime.is_live_at(start):
            row.kept_bytes += sizes[lifetime.tensor]
        if peak is not None and lifetime.begin <= peak < lifetime.until:
            row.peak_bytes += sizes[lifetime.tensor]
    if peak is not None:
        at_peak = dict(program.computes).get(peak)
        owner = 0 if at_peak is None else group_of_operator[at_peak.op]
        rows[owner].peak_bytes += program.instructions[peak].effects(graph).workspace_bytes
    return rows
