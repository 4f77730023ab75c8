"""Real steps of compiled modules: their peaks and times, and what became of a budget."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt.models.budget import format_bytes
from memopt.pricing.baseline import backward, clear_gradients
from memopt.pricing.memory import metered
from memopt.step.backend import timed
from memopt.step.inputs import Call
from memopt.step.loss import Loss
from memopt.step.unheard import unheard
from memopt.torch_private.aot import functorch_set
from memopt.user_code.own_backward import OwnBackward
from memopt.user_code.restored_state import state_restored

_TURNS = 7
"""Steps of each module, in turns, of whose times the median counts."""


@dataclass(frozen=True)
class PartitionReport:
    """What became of a budget.

    Attributes:
        budget_bytes: as asked for.
        planned_within_bytes: what memopt's last plan was made for.
        predicted_peak_bytes: of what is saved, each other value made again once.
        measured_peak_bytes: of a real step, with all that is resident.
        saved, recomputed: forward operators whose results are kept, and that run again.
        rounds: choices compiled and measured.
        chosen: whose choice of what is saved it is: "memopt", or "torch" with the
            `activation_memory_budget` it was made with.
    """

    budget_bytes: int
    planned_within_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    saved: int
    recomputed: int
    rounds: int
    chosen: str

    def __str__(self) -> str:
        return (
            f"budget {format_bytes(self.budget_bytes)}, measured peak "
            f"{format_bytes(self.measured_peak_bytes)} (predicted "
            f"{format_bytes(self.predicted_peak_bytes)}) after {self.rounds} rounds; choice of "
            f"{self.chosen}: {self.saved} values saved, {self.recomputed} operators rerun"
        )


@dataclass(frozen=True)
class RealStep:
    """A training step that compiled forms of one model are measured with.

    Attributes:
        model: the module; a measurement leaves it as it was.
        call: the example call.
        loss: of the outputs; None: their own backward.
    """

    model: nn.Module
    call: Call
    loss: Loss | None

    @property
    def resident_bytes(self) -> int:
        """Parameters, buffers and inputs, each storage once."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.call.tensors()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def peak_bytes(self, run: Any) -> int:
        """Peak of a step with all that is resident, after one to compile and warm up."""
        device = self._device
        with self._left_alone() as (call, run_backward):
            # What is found in AOTAutograd's cache is divided already; Inductor's own is used.
            with functorch_set(enable_autograd_cache=False):
                self._step(run, call, run_backward)
            clear_gradients(self.model, call.tensors())
            with metered(device) as use:
                held = self._step(run, call, run_backward)
            del held
        return self.resident_bytes + use.peak_bytes

    def times_s(self, runs: Sequence[Any]) -> list[float]:
        """Median seconds of a step of each, in turns; all have been compiled."""
        device = self._device
        times: list[list[float]] = [[] for _ in runs]
        with self._left_alone() as (call, run_backward):
            for turn in range(_TURNS + 1):
                for run, found in zip(runs, times, strict=True):
                    clear_gradients(self.model, call.tensors())
                    seconds = timed(partial(self._step, run, call, run_backward), device)
                    if turn:  # the first is to warm up
                        found.append(seconds)
        return [statistics.median(found) for found in times]

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @contextmanager
    def _left_alone(self) -> Iterator[tuple[Call, OwnBackward]]:
        """Around steps: the call to make, and what runs its backward; afterwards all is put
        back."""
        call, loss = self.call.detached(), self.loss
        parts = loss.parts if loss else ()
        with state_restored(self.model, call, *parts) as kept:
            kept.keep_all()
            clear_gradients(self.model, call.tensors())
            yield call, kept.backward
            clear_gradients(self.model, call.tensors())

    @unheard()
    def _step(self, run: Any, call: Call, run_backward: OwnBackward) -> Any:
        output = run(*call.args, **call.kwargs)
        backward(output, self.loss, run_backward)
        return output
