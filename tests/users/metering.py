"""The peak of every training step of a model that plans its own, against its budget."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from memopt.executor.check import unmetered_bytes
from memopt.executor.self_planning import SelfPlanning
from memopt.plan_record import PlanRecord
from memopt.pricing.memory import MemoryUse, metered


def bytes_over(plan: PlanRecord, used: MemoryUse) -> int:
    """The bytes of a metered step's peak above its plan's budget."""
    assert plan.budget is not None
    return unmetered_bytes(plan, torch.device("cpu")) + used.peak_bytes - plan.budget


class StepMeter:
    """Meters steps one by one, each from where its plan is ready: planning measures on its own.
    From its first training call if what a trainer makes before that call (GRPO's completions,
    their masks and rewards) is the trainer's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, from_call: bool = False) -> None:
        self._metering: contextlib.ExitStack | None = None
        self._waits = self._from_call = from_call
        made, called = SelfPlanning._made, SelfPlanning._training_call

        def beside(asking: SelfPlanning, *args: Any) -> Any:
            running = self._metering is not None
            self._stop()
            planned = made(asking, *args)
            if running:
                self._start()
            return planned

        def first(asking: SelfPlanning, *args: Any, **kwargs: Any) -> Any:
            if self._metering is not None and self._waits:
                self._stop()
                self._start()
                self._waits = False
            return called(asking, *args, **kwargs)

        monkeypatch.setattr(SelfPlanning, "_made", beside)
        monkeypatch.setattr(SelfPlanning, "_training_call", first)

    def begin(self) -> None:
        """The step begins."""
        self._waits = self._from_call
        self._start()

    def _start(self) -> None:
        self._metering = contextlib.ExitStack()
        self._used = self._metering.enter_context(metered(torch.device("cpu")))

    def end(self, plan: PlanRecord) -> int:
        """The step, which ran under the plan, ends: the bytes of its peak above the budget."""
        assert self._metering is not None
        self._stop()
        return bytes_over(plan, self._used)

    def _stop(self) -> None:
        if self._metering is not None:
            self._metering.close()
            self._metering = None
