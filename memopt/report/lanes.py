"""The lanes of a step: compute, copies to the host and back, network, host, as spans of time.

Predicted steps (a replay's `Timeline`) and measured ones have the same form, so that a trace shows
both side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os import PathLike
from typing import TYPE_CHECKING

from memopt.models.folders import write_whole
from memopt.models.graph import Graph
from memopt.models.recording import Occupied, Recorded
from memopt.programs.instructions import Instruction, Program
from memopt.programs.replay import Direction, Timeline, replay

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


class Lane(StrEnum):
    """The streams that run in parallel."""

    COMPUTE = "compute"
    OUT = "to host"
    IN = "from host"
    NETWORK = "network"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Span:
    """An interval [start_s, end_s) in which a lane is occupied."""

    lane: Lane
    name: str
    start_s: float
    end_s: float
    stall: bool = False


@dataclass(frozen=True)
class StepLanes:
    """One step, predicted or measured.

    Attributes:
        title: "predicted", "measured"...
        spans: in no particular order.
        memory: (seconds, device bytes) at each change of the device memory; () if unknown.
    """

    title: str
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...] = ()

    @property
    def time_s(self) -> float:
        """Return the end of the last span, seconds."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def stall_s(self) -> float:
        """Return the seconds that the compute lane waits for transfers."""
        return sum(span.end_s - span.start_s for span in self.spans if span.stall)


def program_lanes(
    timeline: Timeline, graph: Graph, program: Iterable[Instruction], title: str = "predicted"
) -> StepLanes:
    """Return the lanes of a replayed program (`replay`)."""
    names = instruction_names(graph, program)
    return _lanes(timeline, names, lambda tensor: graph.tensors[tensor].name, title)


def instruction_names(graph: Graph, program: Iterable[Instruction]) -> list[str]:
    """Name each instruction: by its operator or, if it runs none, by what it does."""
    return [instruction.label(graph) for instruction in program]


def _lanes(
    timeline: Timeline, names: Sequence[str], tensor_name: Callable[[int], str], title: str
) -> StepLanes:
    spans: list[Span] = []
    memory: list[tuple[float, int]] = []
    for i, name in enumerate(names):
        start, end, stall = timeline.start_s[i], timeline.end_s[i], timeline.stall_s[i]
        if stall > 0:
            # A wait is drawn before its instruction, whose own span may be empty.
            begin = start - stall
            spans.append(Span(Lane.COMPUTE, f"wait: {name}", begin, begin + stall, stall=True))
        if end > start:
            spans.append(Span(Lane.COMPUTE, name, start, end))
        memory.append((start, timeline.step_bytes[i]))
        memory.append((end, timeline.live_bytes[i]))
    for transfer in timeline.transfers:
        lane = Lane.OUT if transfer.direction is Direction.TO_HOST else Lane.IN
        spans.append(Span(lane, tensor_name(transfer.tensor), transfer.start_s, transfer.end_s))
    for sent in timeline.collectives:
        spans.append(Span(Lane.NETWORK, names[sent.instruction], sent.start_s, sent.end_s))
    for one in timeline.host_updates:
        spans.append(Span(Lane.HOST, names[one.instruction], one.start_s, one.end_s))
    return StepLanes(title, tuple(spans), tuple(memory))


OUTSIDE = "outside the plan: the loss, autograd"
_LANES = {Occupied.TO_HOST: Lane.OUT, Occupied.FROM_HOST: Lane.IN}


def predicted_lanes(plan: PlanRecord) -> StepLanes:
    """Return the replayed step of a plan."""
    timeline = replay(plan.graph, plan.program, plan.device)
    return program_lanes(timeline, plan.graph, plan.program)


def measured_lanes(plan: PlanRecord, recorded: Sequence[Recorded]) -> StepLanes:
    """Return the lanes of a recorded step; its device memory is not recorded."""
    names = instruction_names(plan.graph, plan.program)
    spans: list[Span] = []
    for one in recorded:
        name = names[one.position]
        if one.what is Occupied.WAIT:
            spans.append(Span(Lane.COMPUTE, f"wait: {name}", one.start_s, one.end_s, stall=True))
        elif one.what is Occupied.COMPUTE:
            spans.append(Span(Lane.COMPUTE, name, one.start_s, one.end_s))
        else:
            effects = plan.program.instructions[one.position].effects(plan.graph)
            (tensor,) = effects.host_begins or effects.begins
            name = plan.graph.tensors[tensor].name
            spans.append(Span(_LANES[one.what], name, one.start_s, one.end_s))
    outside = _between_the_halves(plan.program, recorded)
    if outside is not None:
        spans.append(outside)
    return StepLanes("measured", tuple(spans))


def _between_the_halves(program: Program, recorded: Sequence[Recorded]) -> Span | None:
    """Return the span between the plan's forward and its backward."""
    boundary = program.boundary
    if boundary is None:
        return None
    own = [one for one in recorded if one.what in (Occupied.COMPUTE, Occupied.WAIT)]
    begin = max((one.end_s for one in own if one.position < boundary), default=None)
    end = min((one.start_s for one in own if one.position > boundary), default=None)
    if begin is None or end is None:
        return None
    return Span(Lane.COMPUTE, OUTSIDE, begin, end)


LANES = (Lane.COMPUTE, Lane.OUT, Lane.IN, Lane.NETWORK, Lane.HOST)
MICROSECONDS = 1e6


def trace_events(steps: Iterable[StepLanes]) -> list[dict[str, object]]:
    """Make the events of a Chrome / Perfetto trace of some steps, each a process of its own, one
    thread per lane: complete events ("X") in microseconds, metadata ("M") for names, counters ("C")
    for memory."""
    events: list[dict[str, object]] = []
    for process, step in enumerate(steps, start=1):
        names = [(0, "process_name", step.title)]
        drawn = {*LANES[:3], *(span.lane for span in step.spans)}
        names += [
            (i, "thread_name", lane.value) for i, lane in enumerate(LANES, start=1) if lane in drawn
        ]
        for thread, kind, name in names:
            args = {"name": name}
            events.append({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args})
        for span in sorted(step.spans, key=lambda span: (span.start_s, span.end_s)):
            events.append(
                {
                    "name": span.name,
                    "cat": "stall" if span.stall else span.lane.value,
                    "ph": "X",
                    "ts": span.start_s * MICROSECONDS,
                    "dur": (span.end_s - span.start_s) * MICROSECONDS,
                    "pid": process,
                    "tid": LANES.index(span.lane) + 1,
                }
            )
        for time_s, size_bytes in step.memory:
            events.append(
                {
                    "name": "device memory",
                    "ph": "C",
                    "ts": time_s * MICROSECONDS,
                    "pid": process,
                    "tid": 0,
                    "args": {"bytes": size_bytes},
                }
            )
    return events


def write_trace(path: str | PathLike[str], *steps: StepLanes) -> None:
    """Write a trace file of one or several steps, for ui.perfetto.dev or chrome://tracing."""
    content = {"traceEvents": trace_events(steps), "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(content).encode())
