"""The peer that streams saved tensors to pinned memory with saved-tensor hooks, as torchtune's
activation offloading does: a stream of its own, a few copies under way, no plan, no budget."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from memopt.step.backend import backend_of

SMALLEST_BYTES = 1024
UNDER_WAY = 5


class StreamedHooks(torch.autograd.graph.saved_tensors_hooks):
    """Offload every saved tensor but parameters, views of them, and the small ones."""

    def __init__(self, resident: set[int], device: torch.device) -> None:
        self._resident = resident
        self._device = device
        self._runtime = backend_of(device).runtime
        self._stream = self._runtime.Stream(device)
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        stays = tensor.untyped_storage().data_ptr() in self._resident
        if stays or tensor.nbytes < SMALLEST_BYTES or tensor.device.type != self._device.type:
            return tensor
        compute = self._runtime.current_stream(self._device)
        self._stream.wait_stream(compute)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._runtime.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        end = self._runtime.Event()
        end.record(self._stream)
        # The device tensor is held until its copy is over; then the compute stream may reuse it.
        self._leaving.append((tensor, end))
        while len(self._leaving) > UNDER_WAY:
            _, over = self._leaving.popleft()
            compute.wait_event(over)
        return host, end

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, end = packed
        compute = self._runtime.current_stream(self._device)
        while self._leaving:
            _, over = self._leaving.popleft()
            compute.wait_event(over)
        compute.wait_event(end)
        back: torch.Tensor = host.to(self._device, non_blocking=True)
        return back
