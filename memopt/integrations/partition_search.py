"""Measuring real steps of compiled modules: peaks and times, and the report about a budget."""

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
"""How many steps of each module are timed, in turns; their median counts."""


@dataclass(frozen=True)
class PartitionReport:
    """How a compiled step keeps its budget.

    Attributes:
        budget_bytes: the user's.
        planned_within_bytes: the budget that memopt's last plan was made for.
        predicted_peak_bytes: of the step that recomputes each value at most once.
        measured_peak_bytes: of a real step, resident bytes included.
        saved, recomputed: how many forward operators' results are saved, and how many run again.
        rounds: how many choices were compiled and measured.
        chosen: who chose the saved tensors: "memopt", or "torch" with its
            `activation_memory_budget`.
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
    """A training step for measuring compiled forms of one model."""

    model: nn.Module
    call: Call
    loss: Loss | None

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of parameters, buffers and inputs, each storage once."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.call.tensors()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def peak_bytes(self, run: Any) -> int:
        """Measure a step's peak, resident bytes included, after a step to compile and warm up."""
        device = self._device
        with self._left_alone() as (call, run_backward):
            # AOTAutograd's cache holds graphs already partitioned; Inductor's own cache is used.
            with functorch_set(enable_autograd_cache=False):
                self._step(run, call, run_backward)
            clear_gradients(self.model, call.tensors())
            with metered(device) as use:
                held = self._step(run, call, run_backward)
            del held
        return self.resident_bytes + use.peak_bytes

    def times_s(self, runs: Sequence[Any]) -> list[float]:
        """Time steps of compiled modules in turns; return each one's median seconds."""
        device = self._device
        times: list[list[float]] = [[] for _ in runs]
        with self._left_alone() as (call, run_backward):
            for turn in range(_TURNS + 1):
                for run, found in zip(runs, times, strict=True):
                    clear_gradients(self.model, call.tensors())
                    seconds = timed(partial(self._step, run, call, run_backward), device)
                    if turn:  # the first turn warms up
                        found.append(seconds)
        return [statistics.median(found) for found in times]

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @contextmanager
    def _left_alone(self) -> Iterator[tuple[Call, OwnBackward]]:
        """Yield the call for a step and the function that runs its backward; restore the model's
        state afterwards."""
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
