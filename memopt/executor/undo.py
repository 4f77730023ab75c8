"""Undoing a step that has failed half-way: what each update was to change, as it was before.

Costs host memory of the size of all that is updated, which no plan counts; and the time of copying
it there. For steps that must be all or nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.profiler.step_optimizer import host_like


class Undo:
    """Values from before a step's changes, on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before: list[tuple[torch.Tensor, dict[str, Any] | None]] = []

    def note(self, parameter: torch.Tensor) -> None:
        """Keep a parameter and its optimizer state, which are about to change."""
        self.note_value(parameter)
        state = self._optimizer.state.get(parameter)
        kept = None if state is None else {key: _kept(value) for key, value in state.items()}
        self._before.append((parameter, kept))

    def note_value(self, tensor: torch.Tensor) -> None:
        """Keep a tensor that is about to change."""
        self._values.append((tensor, _kept(tensor.detach())))

    def put_back(self) -> None:
        """Everything is as it was."""
        with torch.no_grad():
            for tensor, value in reversed(self._values):
                tensor.data.copy_(value)
            for parameter, before in reversed(self._before):
                self._put_back_state(parameter, before)
        self.forget()

    def forget(self) -> None:
        """The step has succeeded."""
        self._values.clear()
        self._before.clear()

    def _put_back_state(self, parameter: torch.Tensor, before: dict[str, Any] | None) -> None:
        if before is None:
            self._optimizer.state.pop(parameter, None)
            return
        state = self._optimizer.state[parameter]
        for key in state.keys() - before.keys():
            del state[key]
        for key, value in before.items():
            now = state.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                now.copy_(value)
            else:
                state[key] = value


def _kept(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return host_like(value, value.device).copy_(value)
