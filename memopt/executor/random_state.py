"""Saves and replays generator states of random operators that run more than once.

The generator is the whole process's: its state is changed under one lock, and every random kernel
of a planned step runs under it, so that a step replaying a dropout in one thread does not give a
step in another the numbers of the first. Kernels outside of planned steps are not waited for.

A held lock or a rewound generator must not survive an interruption. So the lock is taken by `with`
alone, which Ctrl-C cannot split, and what a failed step still holds is given back at its end
(`RandomStates.settling`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memopt.step.accelerator import Generator
from memopt.step.backend import backend_of

_lock = threading.RLock()


class _Rewound(threading.local):
    """The generator that each thread has rewound, and the state to restore."""

    moved: tuple[Generator, torch.Tensor] | None = None


_HERE = _Rewound()


def _generator(device: torch.device) -> Generator:
    runtime = backend_of(device).runtime
    return torch.default_generator if runtime is None else runtime.generator(device)


class Replay:
    """Rewinds the generator to `saved` for the block, and restores it afterwards. Enter it under
    the lock."""

    def __init__(self, device: torch.device, saved: bytearray) -> None:
        self._device = device
        self._saved = saved

    def __enter__(self) -> None:
        generator = _generator(self._device)
        now = torch.frombuffer(_state_of(generator), dtype=torch.uint8)
        earlier = torch.frombuffer(self._saved, dtype=torch.uint8)
        _HERE.moved = generator, now
        generator.set_state(earlier)

    def __exit__(self, *_: object) -> None:
        _restore()


def _state_of(generator: Generator) -> bytearray:
    return bytearray(generator.get_state().numpy())


def _restore() -> None:
    if _HERE.moved is not None:
        generator, state = _HERE.moved
        generator.set_state(state)
        _HERE.moved = None


def _settle() -> None:
    """Restore the generator and release the lock, if this thread still holds them."""
    with _lock:
        _restore()
    try:
        while True:
            _lock.release()
    except RuntimeError:
        # The lock is not this thread's: all is well.
        return


class RandomStates:
    """Saves and replays the state of one device's default generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held around every random kernel of a planned step, and around `save` and `replay`."""
        return _lock

    def save(self) -> bytearray:
        """Return the state now, before the operator's first run; under the lock."""
        return _state_of(_generator(self._device))

    def replay(self, saved: bytearray) -> Replay:
        """Return a context in which an operator draws the numbers that it drew after `saved`."""
        return Replay(self._device, saved)

    def replay_from_now(self) -> list[AbstractContextManager[object]]:
        """Return contexts, to be entered in order, that replay the numbers drawn next."""

        return [self.lock, self.replay(self.now())]

    def now(self) -> bytearray:
        """Return the present state, taken under the lock."""

        def saved() -> bytearray:
            with self.lock:
                return self.save()

        found: bytearray = self.settling(saved)()
        return found

    def restore(self, saved: bytearray) -> None:
        """Rewind to `saved`, after a step that failed: its numbers are drawn again."""

        def put() -> None:
            with self.lock:
                _generator(self._device).set_state(torch.frombuffer(saved, dtype=torch.uint8))

        self.settling(put)()

    def settling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run`: if it fails, this thread holds neither the lock nor a rewound generator
        afterwards."""

        def settled(*arguments: Any) -> Any:
            try:
                return run(*arguments)
            except BaseException:
                _settle()
                raise

        return settled


def _before_fork() -> None:
    # The child gets the generator: fork only while no other thread has rewound it.
    _lock.acquire()


def _in_parent() -> None:
    _lock.release()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
