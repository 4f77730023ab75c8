"""A captured and priced step, ready to be planned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memopt.models.graph import Graph
from memopt.models.record import ModelRecord
from memopt.models.stage_record import StageRecord
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.step.optimizer_state import OptimizerState
from memopt.step.step_parts import StepParts


@dataclass(frozen=True)
class Profiled:
    """A model ready to be planned.

    Attributes:
        graph: the priced graph of its training step.
        lowering: the graph's map to FX nodes (unpriced).
        captured: the joint graph and its compiled wrapper.
        baseline: the unplanned step.
        torch_device: where the step runs.
        record: the model and example call that it was captured for, as plan files store them.
        notes: for the user, about the figures.
        optimizer: the optimizer's state, resident in the graph; None: not asked for.
        stages: the stages that the step has passed since its capture, see `memopt.stages`.
    """

    graph: Graph
    lowering: Lowering
    captured: Captured
    baseline: Baseline
    torch_device: torch.device
    record: ModelRecord | None = None
    notes: tuple[str, ...] = ()
    optimizer: OptimizerState | None = None
    stages: tuple[StageRecord, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """The step without memopt.

    Attributes:
        peak_bytes: total device memory, resident included.
        step_time_s: seconds, median.
        measured: whether it was measured (else replayed from the graph).
        library_bytes: memory that libraries keep on the device from step to step (`library_bytes`);
            not in the peak of `measure_baseline`, which counts from the step's beginning.
    """

    peak_bytes: int
    step_time_s: float
    measured: bool
    library_bytes: int = 0


@dataclass(frozen=True)
class ProfiledStep(Profiled):
    """A whole training step ready to be planned.

    Attributes:
        parts: the captured step and its updates.
        user_call: the user's own example call of the model.
        host_state_bytes: optimizer state that is on the host between updates, and not resident; 0:
            it stays on the device.
        movable_state_bytes: optimizer state that is a part of the graph, and may move.
    """

    parts: StepParts | None = None
    user_call: Call | None = None
    host_state_bytes: int = 0
    movable_state_bytes: int = 0
