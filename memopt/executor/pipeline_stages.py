"""What a pipeline's schedule keeps beside a stage's call, read from the schedule
(`torch.distributed.pipelining`) before its first step has run."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from memopt.executor.held_memory import Memory, memory_of, size_of, still_held
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.device import in_blocks
from memopt.step.backend import backend_of
from memopt.step.inputs import Call
from memopt.torch_private import pytree
from memopt.torch_private.access import attribute, attribute_name
from memopt.torch_private.modules import reducing_later

PIPELINES = "torch.distributed.pipelining"
_JOIN = "torch.distributed.pipelining.schedules._PipelineSchedule._merge_outputs"
_JOINED: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
_LOSS_BYTES = 8
"""Of a micro-batch's loss, at most."""


@dataclass(frozen=True)
class StageCall:
    """A call's place in a pipeline's schedule.

    Attributes:
        charges: what it keeps beside the call.
        has_loss: whether a loss may follow that is not charged: not in a stage before the last,
            nor when a pipeline tries out which shapes it sends, and makes its buffers.
    """

    charges: Charges = NO_CHARGES
    has_loss: bool = True

    @property
    def losses_waiting(self) -> int:
        """Losses of other micro-batches that await their backward."""
        return self.has_loss * self.charges.waiting_calls


def scheduled(call: Call) -> StageCall:
    """Return the memory that the schedule of a pipeline keeps beside the present call of its stage:
    other micro-batches until their backward or its second half, the buffers that receive their
    activations and gradients, and the last stage's outputs, which are joined in the end, with those
    of the step before that the loop holds. Only torch's schedules are known."""
    around = _Around()
    stage, schedule = around.stage, around.schedule
    if stage is None or schedule is None or not schedule.pipeline_order:
        return StageCall()
    joined = _joined_by(schedule)
    order = [one for actions in schedule.pipeline_order.values() for one in _single(actions)]
    kinds = [one.computation_type.value for one in order if one.stage_index == stage.stage_index]
    waiting, halved = in_flight(kinds)
    if stage.is_first:  # its backward is whole, where others run their second half
        halved = 0
    calls = kinds.count("F")
    # Those that wait hold their outputs.
    collected = max(0, calls - 1 - waiting) if around.collects else 0
    # The others' activations, and the gradient that is being sent.
    received = [] if stage.is_first else pytree.tree_leaves(call.args)
    sizes = [one.nbytes for one in received if isinstance(one, torch.Tensor)]
    losses = [_LOSS_BYTES] * stage.is_last
    block_bytes = max((backend_of(one.device).block_bytes for one in call.tensors()), default=1)
    charges = Charges(
        kept_bytes=size_of(still_held(joined)) if stage.is_last else 0,
        bucket_bytes=calls * sum(in_blocks(size, block_bytes) for size in [*sizes, *losses]),
        waiting_calls=waiting,
        halved_calls=halved,
        output_calls=collected if stage.is_last else max(0, calls - 1 - halved),
        joined_calls=calls * (stage.is_last and around.collects),
    )
    return StageCall(charges, stage.is_last and around.runs)


def _joined_by(schedule: Any) -> Memory:
    """Return the memory of the outputs that a schedule has joined last. The loop, to which it
    returns them, may hold them for as long as the next step runs."""
    if schedule not in _JOINED:
        _JOINED[schedule] = {}
        join, own = attribute(_JOIN)(type(schedule)), weakref.ref(schedule)

        def noted(chunks: list[Any]) -> Any:
            found = join(own(), chunks)
            _JOINED[own()] = memory_of(pytree.tree_leaves(found))
            return found

        setattr(schedule, attribute_name(_JOIN), noted)
    return _JOINED[schedule]


def accumulating() -> bool:
    """Whether the calls around leave gradients to later ones: those of DistributedDataParallel's
    `no_sync`, and of a pipeline's schedule."""
    return reducing_later() or next(_frames(), None) is not None


def in_flight(kinds: Iterable[str]) -> tuple[int, int]:
    """Return the most micro-batches that await their backward when another's forward begins, and
    the most that await the second half of theirs.

    Args:
        kinds: what a stage computes, in order: F(orward), B(ackward), or of a split one I (of
            inputs) and W (of weights).
    """
    waiting = halved = most_waiting = most_halved = 0
    for kind in kinds:
        if kind == "F":
            most_waiting = max(most_waiting, waiting)
        waiting += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        halved += {"I": 1, "W": -1}.get(kind, 0)
        most_halved = max(most_halved, halved)
    return most_waiting, most_halved


def _single(actions: Iterable[Any]) -> Iterator[Any]:
    """Yield a rank's actions, also those that are joined in one."""
    for action in actions:
        if action is not None:
            yield from getattr(action, "sub_actions", None) or (action,)


class _Around:
    """The pipeline around the present call.

    Attributes:
        stage, schedule: those that make the call; None if there is none, or it is of an unknown
            kind.
        collects: whether outputs are collected.
        runs: whether the call is that of a micro-batch.
    """

    def __init__(self) -> None:
        self.stage: Any = None
        self.schedule: Any = None
        self.collects, self.runs = True, False
        for frame in _frames():
            found, collects = _locals_of(frame, self=None, return_outputs=True)
            if self.stage is None and hasattr(found, "stage_index"):
                self.stage = found
            elif self.schedule is None and hasattr(found, "pipeline_order"):
                self.schedule = found
            self.collects &= collects
            self.runs |= frame.f_code.co_name == "forward_one_chunk"


def _frames() -> Iterator[FrameType]:
    """Yield the frames of torch's pipelines around the present call, the innermost first."""
    frame = sys._getframe().f_back if PIPELINES in sys.modules else None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(PIPELINES):
            yield frame
        frame = frame.f_back


def _locals_of(frame: FrameType, **otherwise: Any) -> list[Any]:
    """Return a function's local variables of these names, or what stands in for one that is not
    there. Until Python 3.12 a frame keeps the copy that is read, and so what it holds: tensors."""
    found = frame.f_locals
    values = [found.get(name, value) for name, value in otherwise.items()]
    if isinstance(found, dict):
        found.clear()
    return values
