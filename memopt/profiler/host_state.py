"""Optimizer state that lives on the host and visits the device for each update.

Not from a paper: ZeRO-Offload (arXiv:2101.06840) keeps state on the host, too, but updates there.
Here the update is the optimizer's own, on the device, so that it is the ordinary step bit for
bit. Nothing overlaps: an update brings its parameter's state, runs, and writes it back; its time
and memory are the update's, measured as such.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memopt.profiler.backend import backend_of
from memopt.profiler.step_optimizer import update_one


class HostState:
    """The state of one optimizer, on the host between updates.

    `optimizer.state` holds host tensors meanwhile (pinned for CUDA; for a model on CPU, memory
    that is not torch's), so `state_dict()` works. Counters without dimensions stay as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hosted: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @property
    def bytes_total(self) -> int:
        """Bytes of state on the host now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._hosted.values())

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step one parameter as `update_one` does, its state away before and afterwards."""
        self.step(parameter, gradient)
        self.put_away(parameter)

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Bring a parameter's state and step it. If that fails, its state is as before."""
        states = self._optimizer.state
        before = states.get(parameter)
        try:
            if before is not None:
                states[parameter] = {
                    key: self._brought(parameter, key, value) for key, value in before.items()
                }
            update_one(self._optimizer, parameter, gradient)
        except BaseException:
            # The host's copies have not been touched.
            if before is None:
                states.pop(parameter, None)
            else:
                states[parameter] = before
            raise

    def leave(self) -> None:
        """Move what is on the device to the host: state from before, or just loaded."""
        for parameter in list(self._optimizer.state):
            self.put_away(parameter)

    def settle(self) -> None:
        """Wait until what has been written back can be read."""
        for device in {parameter.device for parameter, _ in self._hosted}:
            runtime = backend_of(device).runtime
            if runtime is not None:
                runtime.current_stream(device).synchronize()

    def come_back(self) -> None:
        """Put all state on its parameter's device again, for `optimizer.step()`."""
        for parameter, state in self._optimizer.state.items():
            for key in self._movable(state):
                state[key] = self._brought(parameter, key, state[key])
        self._hosted.clear()

    def _brought(self, parameter: torch.Tensor, key: str, value: Any) -> Any:
        """A copy on the device of what is on the host; everything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        away = value.dim() > 0 and value.device != parameter.device
        if away or value is self._hosted.get((parameter, key)):
            there = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device=parameter.device
            )
            return there.copy_(value, non_blocking=True)
        # A counter, which an update changes in place: a copy, so that a failure changes nothing.
        return value.clone() if value.dim() == 0 else value

    def put_away(self, parameter: torch.Tensor) -> None:
        """Move a parameter's state to the host. What cannot be moved stays on the device."""
        state = self._optimizer.state[parameter]
        for key in self._movable(state):
            value = state[key]
            host = self._hosted.get((parameter, key))
            if value is host:
                continue
            if host is None or (host.size(), host.dtype) != (value.size(), value.dtype):
                host = _host_like(value, parameter.device)
                self._hosted[parameter, key] = host
            # In the compute stream's order, as is the copy that brings it for the next update.
            host.copy_(value, non_blocking=True)
            state[key] = host

    def _movable(self, state: dict[str, Any]) -> list[str]:
        return [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0]


def _host_like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host memory for a tensor of a device: pinned, or for CPU not of torch's allocator."""
    if not backend_of(device).on_host:
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device="cpu", pin_memory=True
        )
    size_bytes = value.untyped_storage().nbytes()
    flat = torch.from_numpy(np.empty(size_bytes, dtype=np.uint8)).view(value.dtype)
    return flat.as_strided(value.size(), value.stride(), 0)
