"""Capturing a planned step again: a module's, or a whole step with its updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memopt.capture.capture import capture
from memopt.capture.captures import reused_capture
from memopt.errors import CaptureError, PlanFileError
from memopt.kernels.compiled.choice import planned_kernels
from memopt.models.same_graph import as_captured, graph_difference
from memopt.profiler.input_errors import diagnosed
from memopt.profiler.step_capture import capture_step, with_updates
from memopt.programs.serialize import fingerprint
from memopt.stages.base import Found, Recapture
from memopt.step.build import build
from memopt.step.loss import Loss


def captured_module(step: Recapture) -> Found:
    """Capture a module's step with the planned kernels.

    Raises:
        CaptureError: the model cannot be captured.
        PlanFileError: the example call in the plan's file does not fit the model.
    """
    plan = step.plan
    with blaming_the_file(step.example_of_file), diagnosed(step.model, step.call):
        captured = reused_capture(
            step.model,
            step.call,
            lambda: plan.output_gradients,
            capture,
            kernels="aten" if plan.record is None else plan.record.kernels,
        )
    # Sizes in the file's record may be too large to add up.
    with blaming_the_file(plan.profiled is None, "record", (ValueError,)):
        lowering = build(step.model, captured, step.block_bytes)
    made = planned_kernels(plan.record, step.device, step.block_bytes)(
        step.model, captured, lowering
    )
    return Found(made.captured, made.lowering)


def captured_whole_step(step: Recapture) -> Found:
    """Capture forward, loss, backward and updates with the planned kernels.

    Raises:
        CaptureError: the step cannot be captured.
    """
    record, user_call = step.plan.record, step.user_call
    assert record is not None
    assert user_call is not None
    assert step.optimizer is not None
    loss = Loss(step.loss_fn, step.call.args[0])
    with diagnosed(step.model, user_call, loss):
        parts = capture_step(
            step.model,
            user_call,
            loss,
            step.optimizer,
            record.block_bytes,
            planned_kernels(record, step.device, record.block_bytes),
            record.rules,
        )
    captured, lowering = with_updates(parts, parts.lowering, {})
    return Found(captured, lowering, parts)


def difference_of_graphs(step: Recapture) -> str | None:
    """Say how the captured graph differs from the planned one; None: they are the same."""
    plan, graph = step.plan, step.made.lowering.graph
    found = fingerprint(graph)
    if plan.record is not None:
        planned = plan.record.fingerprint
    else:
        assert plan.profiled is not None
        planned = fingerprint(plan.profiled.lowering.graph)
    if planned == found:
        return None
    several = plan.record is not None and plan.record.ranks > 1
    if several and graph_difference(as_captured(plan.graph), graph) is None:
        return None  # shards are smaller than the largest of any rank, for which the plan has room
    resized = () if plan.record is None else plan.record.resized
    where = graph_difference(as_captured(plan.graph, resized), graph)
    return "" if where is None else f": {where}"


@contextmanager
def blaming_the_file(
    of_file: bool,
    what: str = "example call",
    errors: tuple[type[Exception], ...] = (ValueError, CaptureError),
) -> Iterator[None]:
    """Turn errors inside into a PlanFileError, if the plan file is to blame (`of_file`)."""
    try:
        yield
    except errors as error:
        if not of_file:
            raise
        reason = str(error).partition("\n")[0]
        raise PlanFileError(
            f"the {what} of the plan's file does not fit this model: {reason}"
        ) from error
