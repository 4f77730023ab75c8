"""Chrome / Perfetto traces of steps: one process per step, one thread per lane.

The Trace Event Format: complete events ("X") in microseconds, metadata events ("M") for names,
counter events ("C") for memory. Open the file in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike

from memopt.models.folders import write_whole
from memopt.report.lanes import Lane, StepLanes

LANES = (Lane.COMPUTE, Lane.OUT, Lane.IN, Lane.NETWORK, Lane.HOST)
MICROSECONDS = 1e6


def trace_events(steps: Iterable[StepLanes]) -> list[dict[str, object]]:
    """Make the trace events of some steps, each a process of its own."""
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
    """Write a trace file of one or several steps.

    Args:
        path: the file, ".json".
        steps: for example a predicted and a measured step.
    """
    content = {"traceEvents": trace_events(steps), "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(content).encode())
