"""Meters the memory that a training loop needs beside a wrapped model's planned steps: its loss,
the outputs that it still holds, the optimizer's state. The loop is the user's, so all of it is
known only once it was measured; later plans charge the largest."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.optim import Optimizer

from memopt.errors import ProfilerBusyError
from memopt.executor.calls import warned_of_idle
from memopt.executor.engine_memory import bucket_bytes, gathering, looked_at, zero_charges
from memopt.executor.held_memory import (
    Memory,
    Waiting,
    bytes_of,
    gone_bytes,
    is_metered,
    memory_of,
    size_of,
    still_held,
    when_freed,
)
from memopt.executor.optimizers import OPTIMIZERS
from memopt.executor.pipeline_stages import StageCall, scheduled
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.device import in_blocks
from memopt.pricing.baseline import LARGEST_NUMBER_BYTES
from memopt.pricing.memory import LossMeter, MemoryUse, can_measure, end_metering, freed_again
from memopt.step.backend import backend_of
from memopt.step.inputs import Call, device_of
from memopt.step.optimizer_state import state_bytes
from memopt.step.ranks import members_of, several_are_there
from memopt.step.shards import flat_bytes, held_gradients
from memopt.torch_private import pytree
from memopt.torch_private.modes import backward_number, when_backward_is_over
from memopt.torch_private.modules import data_parallel_around


@dataclass
class _Met:
    """Memory measured around one kind of call.

    Attributes:
        steps: how many were measured; `charges` are the largest of them.
        outputs_bytes: outputs of the last call that are still held when a backward begins.
        gradient_bytes: gradients that exist then, and did not when the call began.
    """

    steps: int = 0
    charges: Charges = NO_CHARGES
    outputs_bytes: int = 0
    gradient_bytes: int = 0


class _Begun(threading.local):
    """Counts the planned calls that have begun, of all models, in each thread."""

    calls = 0


_BEGUN = _Begun()


@dataclass
class _Metered:
    """A call whose loss is being metered.

    Attributes:
        meter: meters it.
        outputs: memory of the call's outputs.
        before: memory that was held when it returned and may be freed since: outputs of the last
            step, gradients.
        ends: weak references that report when the outputs' tensors are freed.
        begun: how many planned calls had begun in this thread.
        tangent_bytes: size of the gradients with which its backward has begun.
    """

    meter: LossMeter
    outputs: Memory
    before: Memory
    ends: list[weakref.ref[torch.Tensor]]
    begun: int
    tangent_bytes: int = 0


@dataclass
class _Watched:
    """Counts an optimizer's steps, and the bytes of its state for the model's parameters."""

    steps: int = 0
    state_bytes: int = 0
    grows: bool = False


class Surroundings:
    """Measures the memory around the planned steps of a model.

    Args:
        model: the model.
        with_state: whether to look for the optimizer's state; False: plans charge it already.

    Attributes:
        settled: whether the model was called with gradients enabled, or has warned that it was not.
        has_stepped: whether an optimizer has stepped since the last call.
        waiting: tells how many calls await their backward, and how many the second half of one.
    """

    waiting: Callable[[], tuple[int, int]] = staticmethod(lambda: (0, 0))

    def __init__(self, model: nn.Module, with_state: bool) -> None:
        self._of = weakref.ref(model)
        self._met: dict[Any, _Met] = {}
        self._outputs, self._last = memory_of(()), memory_of(())  # of this call, of the last
        self._metered: _Metered | None = None
        self._watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()
        self._engine = self._zero = NO_CHARGES
        self._gathering, self._scheduled = NO_CHARGES, StageCall()
        self.has_engine = False
        self._waiting = Waiting()
        self._backward, self.has_stepped = -1, False
        self._with_state, self.settled = with_state, False
        self._update: tuple[Any, torch.device, int] | None = None
        self._update_bytes = 0
        OPTIMIZERS.tell(self)

    def model(self) -> nn.Module | None:
        """Return the model, if it is still there."""
        return self._of()

    def remove(self) -> None:
        """Stop metering."""
        self.stop()
        OPTIMIZERS.tell_no_more(self)

    def charges(self, kind: Any) -> Charges:
        """Return the largest charges measured around a kind of call."""
        one = self._met.get(kind, _Met())
        known = self.certain().largest(self._waiting.charges.plus(self._engine))
        loss_bytes = one.charges.kept_bytes * (1 + self._scheduled.losses_waiting)
        return replace(
            one.charges,
            state_bytes=sum(x.state_bytes for x in self._watched.values()),
            kept_bytes=loss_bytes + one.outputs_bytes + one.gradient_bytes,
            forward_bytes=max(0, one.charges.forward_bytes - one.outputs_bytes),
            update_bytes=self._update_bytes,
        ).plus(known)

    def certain(self) -> Charges:
        """Return the charges that are known before a step has run."""
        known = self._engine.plus(self._scheduled.charges)
        return known.plus(looked_at(self.model())) if torch.is_anomaly_enabled() else known

    def before_engine(self, has_engine: bool) -> None:
        """Look at the model before an engine's hooks on it have run, if it has some."""
        self.has_engine, model = has_engine, self.model()
        self._zero = zero_charges(model) if has_engine and model is not None else NO_CHARGES
        if has_engine and model is not None and hasattr(model, "unshard"):
            # After a forward alone its parameters are whole still.
            self._gathering = gathering(model) or self._gathering

    def metered_whole(self) -> None:
        """Charge no gathering any more: from now on metered steps include it."""
        self._gathering = NO_CHARGES

    def calling(self, kind: Any, call: Call, waiting: int = 0, halved: int = 0) -> None:
        """Begin a call of a kind, while `waiting` calls await their backward, and `halved` the
        second half of one. The most that wait in a step are charged from the next step on. A step
        begins when none waits, or an optimizer has stepped, or the loop drops calls while it makes
        others (some may never get a backward). A pipeline's schedule tells how many at once."""
        again_bytes, metered = 0, self._metered
        if backward_number() == -1:
            self.stop()
        else:
            # A checkpoint runs the call again, beside the gradients of what it has returned.
            again_bytes = size_of(self._outputs)
            if metered is not None:
                self._metered_until_now(metered, again_bytes)
        _BEGUN.calls += 1
        dropped = self._waiting.count(call.tensors(), waiting, halved)
        if dropped or self.has_stepped or not waiting:
            self._scheduled = scheduled(call)
            self._waiting.charge(told=bool(self._scheduled.charges))
        self.has_stepped = False
        flat = 0 if (model := self.model()) is None else flat_bytes(model)
        around = self._gathering.plus(self._zero)
        self._engine = Charges(bucket_bytes=bucket_bytes() + flat).plus(around)
        held_bytes = self.held_bytes()
        # Those of a call that waits are charged with it.
        kept = waiting or self._scheduled.charges.output_calls
        self._last = {} if kept or held_bytes <= LARGEST_NUMBER_BYTES else self._outputs
        if self._last or again_bytes:
            self._largest(kind, Charges(forward_bytes=held_bytes + again_bytes))

    def held_bytes(self) -> int:
        """Return the bytes of the last call's outputs that are still held."""
        self._outputs = still_held(self._outputs)
        return size_of(self._outputs)

    def called(
        self,
        kind: Any,
        call: Call,
        output: Any,
        device: torch.device | None,
        met: Callable[[], None],
        times: float = 1.0,
    ) -> None:
        """Begin to meter a planned call that has returned.

        Args:
            kind: of the call.
            call: the call.
            output: its output.
            device: where its loss is to be metered; None: it is charged already.
            met: called when more memory is measured than before.
            times: how many times as long the calls are that the kind's plan charges.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        before, given = self._outputs, memory_of(call.tensors())
        self._outputs = {at: x for at, x in memory_of(tensors).items() if at not in given}
        trained = any(tensor.requires_grad for tensor in tensors)
        if device is None or not (trained and self._scheduled.has_loss):
            return
        if self._by_itself():
            end_metering()  # of another stage
        one, model = self._met.setdefault(kind, _Met()), self.model()
        due = is_metered(one.steps + 1)
        if due and not LossMeter.possible(device):
            return
        one.steps += 1
        if model is None or not due:
            return
        before = before | memory_of(held_gradients(model))
        try:
            meter = LossMeter(device, partial(self._found, kind, device, met, times))
        except ProfilerBusyError:  # another thread's profile has begun since
            return
        ends = when_freed(tensors, meter.ended)
        self._metered = _Metered(meter, self._outputs, before, ends, _BEGUN.calls)

    def _by_itself(self) -> bool:
        """Return whether this rank runs the model by itself, as a pipeline's stage."""
        if not several_are_there():
            return False
        model = self.model()
        members = () if model is None else members_of(model)
        together = len(members) == torch.distributed.get_world_size()
        return not (together or self.has_engine or data_parallel_around() is not None)

    def arrived(
        self, kind: Any, tangents: list[Any], met: Callable[[], None], kept: Charges
    ) -> None:
        """Note that the backward of a planned call begins with the gradients of its outputs. Call
        `met` if more memory is held beside it than was measured before, or if the loop turns out to
        hold these gradients; the buffers of a pipeline's stage are charged already."""
        self._meter_until(tangents)
        self._waiting.begun(self.waiting()[1] - kept.kept_gradients)  # this one's second half
        one, model = self._met.setdefault(kind, _Met()), self.model()
        if not (one.charges.given_gradients or self._scheduled.charges):
            when_backward_is_over(partial(self._held_until_over, kind, memory_of(tangents), met))
        was = one.outputs_bytes, one.gradient_bytes
        one.outputs_bytes = max(size_of(still_held(self._last)), one.outputs_bytes)
        *_, holding = kind
        own = () if holding or self.has_engine or model is None else held_gradients(model)
        one.gradient_bytes = max(bytes_of(own) + kept.kept_bytes, one.gradient_bytes)
        # Gradients that one backward makes in several calls are added up inside autograd, while
        # the loop holds the outputs of all.
        again = int(self._backward == backward_number())
        self._backward = backward_number()
        calls = replace(kept, kept_bytes=0, added_calls=again, output_calls=again)
        if self._largest(kind, calls) or (one.outputs_bytes, one.gradient_bytes) != was:
            met()

    def _held_until_over(self, kind: Any, tangents: Memory, met: Callable[[], None]) -> None:
        """Charge the gradients of outputs that only the loop still holds."""
        held_bytes = size_of(still_held(tangents))
        if held_bytes > LARGEST_NUMBER_BYTES and self._largest(kind, Charges(given_gradients=1)):
            met()

    def _meter_until(self, tangents: list[Any]) -> None:
        metered = self._metered
        if metered is not None and metered.begun != _BEGUN.calls and self._by_itself():
            # Other stages of this rank have run since, with budgets of their own.
            self.stop()
        elif metered is not None:
            self._metered_until_now(metered, bytes_of(tangents))

    @staticmethod
    def _metered_until_now(metered: _Metered, tangent_bytes: int) -> None:
        metered.tangent_bytes = tangent_bytes
        metered.ends.clear()
        before_bytes = sum(gone_bytes(metered.before).values())
        metered.meter.arrived(gone_bytes(metered.outputs), before_bytes)

    def _found(
        self,
        kind: Any,
        device: torch.device,
        met: Callable[[], None],
        times: float,
        use: MemoryUse,
    ) -> None:
        metered, self._metered = self._metered, None
        if metered is None:
            return
        more = use.update_bytes > self._update_bytes
        self._update_bytes = max(use.update_bytes, self._update_bytes)
        backend = backend_of(device)
        tangent_bytes = in_blocks(metered.tangent_bytes, backend.block_bytes)
        sizes = (use.peak_bytes - tangent_bytes, use.end_bytes - tangent_bytes)
        # The bytes of a number are charged in every step.
        least = backend.step_scalars_bytes
        boundary, kept = (math.ceil(size * times) if size > least else 0 for size in sizes)
        if self._largest(kind, Charges(boundary_bytes=boundary, kept_bytes=kept)) or more:
            met()

    def _largest(self, kind: Any, charges: Charges) -> bool:
        """Take the larger charges; return whether any has grown."""
        one = self._met.setdefault(kind, _Met())
        before, one.charges = one.charges, one.charges.largest(charges)
        return one.charges != before

    def stop(self) -> bool:
        """Meter no further what is being metered. Return whether a plan can be made now: a profile
        ends with the backward that it has seen beginning, and planning makes its own."""
        metered, self._metered = self._metered, None
        if metered is None:
            return True
        metered.ends.clear()
        metered.meter.close()
        return not metered.meter.profiles

    def can_measure(self, call: Call) -> bool:
        """Return whether a plan for a call can be measured now: on a CPU not while somebody else's
        profile runs."""
        model = self.model()
        return model is None or can_measure(device_of(model, call))

    def stepping(self, optimizer: Optimizer) -> None:
        """Begin to meter an optimizer's step inside a backward, in a hook on a gradient."""
        self._update, model = None, self.model()
        if backward_number() == -1 or model is None:
            return
        if self._metered is not None:
            self._metered.meter.update()
        device = next((one.device for one in model.parameters()), None)
        watched = self._watched.get(optimizer, _Watched())
        if device is None or not is_metered(watched.steps + 1):
            return
        runtime = backend_of(device).runtime
        if runtime is not None:
            self._update = runtime, device, int(runtime.memory_allocated(device))
            runtime.reset_peak_memory_stats(device)

    def _update_ended(self) -> None:
        if backward_number() != -1 and self._metered is not None:
            self._metered.meter.update()
        if self._update is not None:
            runtime, device, start = self._update
            now, peak = runtime.memory_allocated(device), runtime.max_memory_allocated(device)
            needed = freed_again(int(peak) - start, int(now) - start)
            self._update_bytes = max(needed, self._update_bytes)
            self._update = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped, and find its state for the model's parameters."""
        self._update_ended()
        self.has_stepped = True
        watched = self._watched.setdefault(optimizer, _Watched())
        watched.steps += 1
        model = self.model()
        if model is None or not (watched.grows or is_metered(watched.steps)):
            return
        if not self.settled:
            self.settled = warned_of_idle(model, optimizer, OPTIMIZERS.settled())
        self.charge_state(optimizer)

    def charge_state(self, optimizer: Optimizer) -> None:
        """Find the state that an optimizer has for the model's parameters."""
        watched, model = self._watched.setdefault(optimizer, _Watched()), self.model()
        if not self._with_state or model is None:
            return
        own, total = {id(parameter) for parameter in model.parameters()}, 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in own and optimizer.state.get(parameter):
                    block_bytes = backend_of(parameter.device).block_bytes
                    total += state_bytes(optimizer, group, parameter, block_bytes)
        watched.grows, watched.state_bytes = total > watched.state_bytes, total
