"""Replaying random numbers: a recomputed random operator draws what it drew the first time.

States live outside the device's allocator (5 KB each on CPU, 16 bytes on CUDA). The default
generator is shared by all threads, so that planned steps draw one at a time: else a thread could
draw between another's save and its kernel, and the re-run would give other numbers.
"""

from __future__ import annotations

import threading

import torch

_ONE_AT_A_TIME = threading.RLock()


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class Replay:
    """Inside the block the generator is where `saved` was; afterwards where it was before."""

    def __init__(self, device: torch.device, saved: bytearray) -> None:
        self._device = device
        self._saved = saved
        self._now: torch.Tensor | None = None

    def __enter__(self) -> None:
        _ONE_AT_A_TIME.acquire()
        generator = _generator(self._device)
        now = bytearray(generator.get_state().numpy())
        self._now = torch.frombuffer(now, dtype=torch.uint8)
        generator.set_state(torch.frombuffer(self._saved, dtype=torch.uint8))

    def __exit__(self, *_: object) -> None:
        try:
            if self._now is not None:
                _generator(self._device).set_state(self._now)
        finally:
            _ONE_AT_A_TIME.release()


class RandomStates:
    """Saves and replays the state of one device's default generator.

    Attributes:
        lock: held around every random kernel of a planned step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lock = _ONE_AT_A_TIME

    def save(self) -> bytearray:
        """The state now, before the operator's first run; under the lock."""
        return bytearray(_generator(self._device).get_state().numpy())

    def replay(self, saved: bytearray) -> Replay:
        """Context in which an operator draws again what it drew when `saved` was saved."""
        return Replay(self._device, saved)
