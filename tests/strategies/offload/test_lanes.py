"""Lanes and the trace file of a step with transfers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from memopt.models.device import Device
from memopt.programs.replay import replay
from memopt.reductions.chain_to_graph import chain_to_graph
from memopt.report.lanes import Lane, Span, StepLanes, program_lanes, write_trace
from tests.strategies.offload.chains import three_stages
from tests.strategies.offload.test_replay import GOOD, as_graph, lowered, schedule

DEVICE = Device(to_host_bytes_per_s=2.0, from_host_bytes_per_s=1.0)


def lanes() -> StepLanes:
    view = chain_to_graph(three_stages())
    program = view.lower(schedule(GOOD))
    return program_lanes(replay(view.graph, program, DEVICE), view.graph, program)


def test_lanes_tell_stalls_from_work() -> None:
    step = lanes()
    assert step.time_s == 10.0
    assert step.stall_s == 4.0
    stalls = [(s.name, s.start_s, s.end_s) for s in step.spans if s.stall]
    assert stalls == [("wait: Free", 1, 2), ("wait: B^1", 6, 9)]
    assert [s for s in step.spans if s.lane is Lane.OUT] == [Span(Lane.OUT, "a^0", 0, 2)]
    assert [s for s in step.spans if s.lane is Lane.IN] == [Span(Lane.IN, "a^0", 5, 9)]
    compute = sorted((s.start_s, s.end_s) for s in step.spans if s.lane is Lane.COMPUTE)
    assert compute[0][0] == 0
    assert compute[-1][1] == 10
    for (_, end), (start, _) in itertools.pairwise(compute):
        assert start == end


def test_program_lanes_are_the_same() -> None:
    chain = three_stages()
    graph, program = as_graph(chain), lowered(chain, tuple(schedule(GOOD)))
    other = program_lanes(replay(graph, program, DEVICE), graph, program)
    assert other.stall_s == lanes().stall_s
    assert other.time_s == lanes().time_s


def test_trace_file(tmp_path: Path) -> None:
    step = lanes()
    path = tmp_path / "step.json"
    write_trace(path, step, StepLanes("measured", step.spans[:3]))
    events = json.loads(path.read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(step.spans) + 3
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"predicted", "measured", "compute", "to host", "from host"}
    assert {e["cat"] for e in complete} == {"compute", "to host", "from host", "stall"}
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(counters) == 9
