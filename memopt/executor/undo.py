"""Records what a train step has changed, and takes it back if the step fails.

Updates in the middle of the backward change parameters and optimizer state in place, so that the
old values are gone when a later operator fails. With copies of them on the host a step is done
whole or not at all. They take host memory as large as the parameters, their state and the buffers,
and the time to write it, once for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memopt.step.backend import backend_of
from memopt.step.shards import local_part
from memopt.step.step_optimizer import host_like


class Undo:
    """Copies of the tensors that a step changes, made before it changes them.

    The host memory is taken in the first step and used again in the next ones."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._memory: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[tuple[torch.Tensor, Any, dict[str, Any]]] = []

    def begin(self) -> None:
        """Begin a step: drop the references of the one before."""
        self._copies.clear()
        self._states.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a buffer or an input before it is written to."""
        self._keep((tensor, ""), tensor)

    def keep_update(self, parameter: torch.Tensor) -> None:
        """Copy a parameter and its state before they are updated."""
        state = self._optimizer.state.get(parameter)
        self._states.append((parameter, state, dict(state or {})))
        self._keep((parameter, ""), parameter)
        for name, value in (state or {}).items():
            if isinstance(value, torch.Tensor):
                self._keep((parameter, name), value)

    def _keep(self, key: tuple[torch.Tensor, str], tensor: torch.Tensor) -> None:
        copy, own = self._memory.get(key), local_part(tensor).detach()
        if copy is None or (copy.size(), copy.dtype) != (own.size(), own.dtype):
            # Of its own size, if it is a part of a larger storage.
            like = torch.empty_like(own, device="meta")
            copy = self._memory[key] = host_like(like, key[0].device)
        # In the compute stream's order, before the update.
        copy.copy_(own, non_blocking=True)
        self._copies.append((tensor, copy))

    def restore(self) -> None:
        """Restore the former values of everything that was kept; may be called again."""
        for device in {tensor.device for tensor, _ in self._copies}:
            # The device may still be writing to state on the host.
            backend_of(device).synchronize(device)
        for parameter, state, entries in self._states:
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                state.clear()
                state.update(entries)
                self._optimizer.state[parameter] = state
        for tensor, copy in self._copies:
            # A parameter may be on the host by now, or on the device.
            local_part(tensor).detach().copy_(copy)


@dataclass
class Changes:
    """The changes that a step has made so far; false if none.

    Attributes:
        parameters: how many there are to update.
        mutated: how many buffers and inputs there are to move at the end.
        updated: how many parameters the device has updated.
        on_host: how many the host has, in a thread of its own.
        half: parameters whose update failed when they or their state may already have been changed.
        buffers: how many buffers and inputs have been moved.
        complete: whether the step has come to its end.
    """

    parameters: int
    mutated: int
    updated: int = 0
    half: str = ""
    buffers: int = 0
    on_host: int = 0
    complete: bool = False

    def clear(self) -> None:
        """Note that all has been taken back."""
        self.updated, self.on_host, self.half, self.buffers = 0, 0, "", 0

    def __bool__(self) -> bool:
        return bool(self.updated or self.on_host or self.half or self.buffers)

    def text(self, reason: str) -> str:
        """Return a sentence for an error."""
        if self.complete:
            return f"the step was done before the {reason}: everything is as after it"
        its = "their" if ", " in self.half else "its"
        half = f", and {self.half} or {its} state perhaps in part" if self.half else ""
        buffers = f" and {self.buffers} of {self.mutated} buffers" if self.buffers else ""
        updated = self.updated + self.on_host
        return (
            f"the step failed after {updated} of {self.parameters} parameters{buffers} had "
            f"been updated{half} ({reason}); restore a checkpoint before going on"
        )
