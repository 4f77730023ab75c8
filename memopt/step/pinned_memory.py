"""Pinned host memory of exactly the bytes that a plan counts.

Torch's own allocator of pinned memory rounds each size up to a power of two, by which a host budget
could be exceeded twice over. So memory of whole pages is registered with the device where its kind
can do that (`Backend.register_host`, as cudaHostRegister).
"""

from __future__ import annotations

import mmap
import os

import torch

from memopt.models.warned import warn
from memopt.step.backend import Backend, backend_of


class _Registered(mmap.mmap):
    """Anonymous memory that the device may copy from and to; tensors over it keep it alive."""

    backend: Backend | None = None
    device: torch.device
    address: int
    process: int

    def __del__(self) -> None:
        # A forked child has neither the device nor the registration.
        if self.backend is not None and self.process == os.getpid():
            assert self.backend.unregister_host is not None
            self.backend.synchronize(self.device)  # copies of it may be under way
            self.backend.unregister_host(self.address)


def pinned_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate pinned memory for a device's copies: a uint8 tensor of so many bytes on the host.
    Where it takes more, the user is warned."""
    backend = backend_of(device)
    if backend.register_host is None or size_bytes == 0:
        return _rounded(size_bytes, device, "memopt knows no way to, for this kind of device")
    memory = _Registered(-1, size_bytes)  # shared with forked children: a fork moves no page of it
    found = torch.frombuffer(memory, dtype=torch.uint8)
    memory.address, memory.device, memory.process = found.data_ptr(), device, os.getpid()
    try:
        backend.register_host(memory.address, size_bytes)
    except RuntimeError as error:
        return _rounded(size_bytes, device, str(error))
    memory.backend = backend
    return found


def _rounded(size_bytes: int, device: torch.device, why: str) -> torch.Tensor:
    """Allocate by torch's own allocator, which takes the next power of two."""
    if size_bytes & (size_bytes - 1):
        warn(
            f"host memory cannot be registered with {device} ({why}): torch's pinned memory is "
            f"used, which takes {1 << size_bytes.bit_length()} bytes where {size_bytes} are "
            "planned: plan with half the host_budget= to stay within it",
        )
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
