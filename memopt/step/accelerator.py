"""Streams, events, memory and random generators of one kind of device, whichever it is.

`torch.accelerator` and `torch.Stream` do the same for every kind; what they lack (names,
generators) is asked of `torch.get_device_module`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Generator(Protocol):
    """A random generator, whose state can be saved and restored."""

    def get_state(self) -> torch.Tensor:
        """Return the state, a uint8 tensor on the host."""

    def set_state(self, state: torch.Tensor) -> object:
        """Restore a state."""


class _ModuleGenerator:
    """The generator of a kind that has one for all its devices and names none (mps)."""

    def __init__(self, module: Any) -> None:
        self.get_state, self.set_state = module.get_rng_state, module.set_rng_state


class Accelerator:
    """One kind of device. Its methods are those of `torch.cuda`; devices are given as torch's.

    Args:
        kind: torch's name for the kind, `device.type`.
    """

    synchronize = staticmethod(torch.accelerator.synchronize)
    current_stream = staticmethod(torch.accelerator.current_stream)
    current_device = staticmethod(torch.accelerator.current_device_index)
    memory_allocated = staticmethod(torch.accelerator.memory_allocated)
    max_memory_allocated = staticmethod(torch.accelerator.max_memory_allocated)
    memory_reserved = staticmethod(torch.accelerator.memory_reserved)
    reset_peak_memory_stats = staticmethod(torch.accelerator.reset_peak_memory_stats)
    mem_get_info = staticmethod(torch.accelerator.get_memory_info)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def Stream(self, device: torch.device) -> torch.Stream:
        """Return a stream beside the default one."""
        return torch.Stream(device)

    def Event(self, enable_timing: bool = False) -> torch.Event:
        """Return an event, not yet recorded."""
        return torch.Event(self.kind, enable_timing=enable_timing)

    def stream(self, stream: torch.Stream) -> torch.Stream:
        """Return a context in which a stream is the current one of its device."""
        return stream

    def get_device_name(self, device: torch.device) -> str:
        """Return the hardware's name, for the key of measured costs."""
        name = getattr(torch.get_device_module(self.kind), "get_device_name", None)
        return self.kind if name is None else str(name(device))

    def generator(self, device: torch.device) -> Generator:
        """Return a device's default random generator."""
        module = torch.get_device_module(self.kind)
        generators = getattr(module, "default_generators", None)
        if not generators:
            return _ModuleGenerator(module)
        found: Generator = generators[
            self.current_device() if device.index is None else device.index
        ]
        return found


def accelerator_kind() -> str | None:
    """Return the kind of this machine's accelerator; None: it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type
