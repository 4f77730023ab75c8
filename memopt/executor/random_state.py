"""Replaying random numbers: a recomputed random operator draws what it drew the first time.

States live outside the device's allocator (5 KB each on CPU, 16 bytes on CUDA).
"""

from __future__ import annotations

import torch


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class RandomStates:
    """Saves, restores and puts back the state of one device's default generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def save(self) -> bytearray:
        """The state now, before the operator's first run."""
        return bytearray(_generator(self._device).get_state().numpy())

    def enter(self, saved: bytearray) -> bytearray:
        """Go back to `saved` for a re-run; returns the state to `leave` to."""
        generator = _generator(self._device)
        now = bytearray(generator.get_state().numpy())
        generator.set_state(torch.frombuffer(saved, dtype=torch.uint8))
        return now

    def leave(self, now: bytearray) -> None:
        """Put the generator back to where it was before the re-run."""
        _generator(self._device).set_state(torch.frombuffer(now, dtype=torch.uint8))
