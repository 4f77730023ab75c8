"""Recorded steps: what runs, waits and moves when, and the trace file that shows it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.api.plan import Plan
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.recorder import HostClock, Recorder
from memopt.executor.swap_streams import StreamSwap
from memopt.executor.values import place_host_copies
from memopt.models.instances import rotor_toy
from memopt.models.recording import Occupied, Recorded
from memopt.programs.instructions import Compute, Free, SwapIn, SwapOut
from memopt.report.lanes import OUTSIDE, Lane
from tests.executor.harness import swap_all
from tests.executor.test_swap import prepared_block, rows
from tests.executor.test_swap_streams import LateStreams
from tests.plan.tiny import make, profiled


def offloaded() -> tuple[nn.Module, Plan]:
    """A model and a plan of it that moves something."""
    model, inputs, loss = make("mlp")
    found = profiled((model, inputs, loss))
    link = memopt.Device(to_host_bytes_per_s=1e9)
    plan = memopt.plan(found, budget="min", strategy="offload-graph", device=link, progress=False)
    assert plan.host_peak_bytes > 0
    return model, plan


def test_a_measured_step_beside_the_predicted_one(tmp_path: Path) -> None:
    model, plan = offloaded()
    assert plan.program is not None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = tmp_path / "step.json"
    predicted, measured = plan.trace(path, model)
    for step in (predicted, measured):
        count = Counter(span.lane for span in step.spans)
        assert count[Lane.OUT] == sum(isinstance(i, SwapOut) for i in plan.program)
        assert count[Lane.IN] == sum(isinstance(i, SwapIn) for i in plan.program)
        assert all(0 <= span.start_s <= span.end_s for span in step.spans)
        names = Counter(s.name for s in step.spans if s.lane is not Lane.COMPUTE)
        assert names == Counter(s.name for s in predicted.spans if s.lane is not Lane.COMPUTE)
    computed = [s for s in measured.spans if s.lane is Lane.COMPUTE and not s.stall]
    assert sum(s.name == OUTSIDE for s in computed) == 1
    assert len(computed) == len(plan.program.instructions)  # the boundary is the loss
    in_order = sorted((s for s in measured.spans if s.lane is Lane.COMPUTE), key=lambda s: s.end_s)
    for first, second in itertools.pairwise(in_order):
        assert first.end_s <= second.start_s
    processes = [
        e["args"]["name"]
        for e in json.loads(path.read_text())["traceEvents"]
        if e["name"] == "process_name"
    ]
    assert processes == ["predicted", "measured"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_prediction_alone_and_of_a_chain(tmp_path: Path) -> None:
    plan = memopt.plan(rotor_toy(), budget="min")
    (step,) = plan.trace(tmp_path / "chain.json")
    assert step.time_s == pytest.approx(plan.step_time_s)
    with pytest.raises(ValueError, match="made from a cost model"):
        plan.trace(tmp_path / "chain.json", nn.Linear(1, 1))


def test_order_on_the_lanes_of_a_recorded_step() -> None:
    """A reader begins after its copy came; a Free that waits for a copy ends with it."""
    prepared = prepared_block(random=False)
    program = swap_all(prepared.graph)
    recorder = Recorder(HostClock())
    installed = install(prepared.captured, prepared.lowering, program, recorder=recorder)
    assert "record.begin(0)" in installed.source
    module = PlannedModule(
        prepared.model, prepared.captured, runtime_of(prepared.captured), installed
    )
    module(*rows())[0].sum().backward()
    found = recorder.take()
    assert recorder.take() == ()
    spans = {(one.what, one.position): one for one in found}
    out: dict[int, Recorded] = {}
    back: dict[int, Recorded] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, SwapOut):
            out[instruction.tensor] = spans[Occupied.TO_HOST, position]
        elif isinstance(instruction, SwapIn):
            back[instruction.tensor] = spans[Occupied.FROM_HOST, position]
            assert out[instruction.tensor].end_s <= back[instruction.tensor].start_s
        elif isinstance(instruction, Free) and instruction.tensor in out:
            own = spans[Occupied.COMPUTE, position]
            assert out[instruction.tensor].end_s <= own.end_s
        elif isinstance(instruction, Compute):
            begin = spans[Occupied.COMPUTE, position].start_s
            for tensor in prepared.graph.operators[instruction.op].reads:
                if tensor in back:
                    assert back[tensor].end_s <= begin
    assert back


def test_streams_record_their_waits() -> None:
    """As on CUDA: the compute stream's waits are recorded, and steps come out the same."""
    prepared = prepared_block(random=False)
    program = swap_all(prepared.graph)
    recorder = Recorder(HostClock())
    size = place_host_copies(prepared.graph, program).extent_bytes
    swap = StreamSwap(LateStreams(), size, recorder)
    installed = install(prepared.captured, prepared.lowering, program, swap=swap, recorder=recorder)
    module = PlannedModule(
        prepared.model, prepared.captured, runtime_of(prepared.captured), installed
    )
    module(*rows())[0].sum().backward()
    waits = [one for one in recorder.take() if one.what is Occupied.WAIT]
    assert waits
    for one in waits:
        assert not isinstance(program.instructions[one.position], SwapOut)
