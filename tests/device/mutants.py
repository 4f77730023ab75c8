"""Executors with one thing about the device missing or wrong: each must be caught by wrong bits or
by a wait of the host. Defects that only spoil what nobody reads are judged in `tests/races`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memopt.executor import code_writer, random_state, values
from memopt.executor.swap_streams import DeviceStreams, PooledCopy, StreamSwap
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from tests.device import accelerator
from tests.races.mutants import (
    _first_address,
    _lease_marks,
    _no_wait,
    _NothingHeld,
    _NothingHeldIn,
    _PoolNotIdle,
    _reloads_at_the_bottom,
)


@dataclass(frozen=True)
class Mutant:
    """One defect; as `tests.races.mutants.Mutant`, for a device's own streams."""

    name: str
    streams: type[DeviceStreams] = DeviceStreams
    swap: type[StreamSwap] = StreamSwap
    patched: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    program: Callable[[Graph, Program], Program] = field(default=lambda _, program: program)

    def __str__(self) -> str:
        return self.name


def _copying(after: Callable[[bool, Sequence[Any]], Sequence[Any]]) -> type[DeviceStreams]:
    class Copying(DeviceStreams):
        def copy(self, target: Tensor, source: Tensor, outward: bool, events: Sequence[Any]) -> Any:
            return super().copy(target, source, outward, after(outward, events))

    return Copying


class _EventBeforeCopy(DeviceStreams):
    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Any]) -> Any:
        early = self.mark(self._out if outward else self._in)
        super().copy(target, source, outward, after)
        return early


class _OneForBoth(DeviceStreams):
    """The end of a copy back is noted on the stream of the copies out."""

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Any]) -> Any:
        end = super().copy(target, source, outward, after)
        return end if outward else self.mark(self._out)


class _Elsewhere(DeviceStreams):
    """The copy stream waits and is waited for, and the copy runs on another."""

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Any]) -> Any:
        stream = self._out if outward else self._in
        for event, _ in after:
            stream.wait_event(event)
        with self._runtime.stream(torch.Stream(self._device)):
            target.copy_(source, non_blocking=True)
        return self.mark(stream)


class _Blocking(DeviceStreams):
    """Copies as `copy_` makes them unless told otherwise: the host waits."""

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Any]) -> Any:
        stream = self._out if outward else self._in
        for event, _ in after:
            stream.wait_event(event)
        with self._runtime.stream(stream):
            target.copy_(source)
        return self.mark(stream)


class _Unpinned(DeviceStreams):
    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


class _NoWait(DeviceStreams):
    def wait(self, event: Any, home: Any) -> None:
        pass


class _HostWaits(DeviceStreams):
    def wait(self, event: Any, home: Any) -> None:
        event[0].synchronize()


class _StaleMark(DeviceStreams):
    """The event of the first mark serves for all."""

    def mark(self, home: Any) -> Any:
        if not hasattr(self, "first"):
            self.first = super().mark(home)
        return self.first


class _MarksOnDefault(DeviceStreams):
    """Producers are taken to run on the default stream."""

    def mark(self, home: Any) -> Any:
        return super().mark(accelerator.mod.default_stream(self._device))


class _AllocatesElsewhere(DeviceStreams):
    """Memory for what comes back is taken on the copy stream, which frees it in its own order."""

    def device_bytes(self, size_bytes: int) -> Tensor:
        with self._runtime.stream(self._in):
            return super().device_bytes(size_bytes)


def _patch(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


def _unwaited(*more: Callable[[], AbstractContextManager[Any]]) -> Any:
    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(code_writer.Writer, "arrive", _no_wait))
            for one in more:
                stack.enter_context(one())
            yield

    return patched


def _not_rewound(replay: random_state.Replay) -> None:
    random_state._HERE.moved = None


def _not_restored() -> None:
    random_state._HERE.moved = None


def _zeros(device: torch.device) -> torch.Generator:
    """The other device's generator."""
    return accelerator.generator(1)  # type: ignore[no-any-return]


MUTANTS = (
    Mutant("a copy out before its producer", _copying(lambda out, events: () if out else events)),
    Mutant("a reload over memory in use", _copying(lambda out, e: e if out else e[1:])),
    Mutant("an event before the copy that it stands for", _EventBeforeCopy),
    Mutant("the end of a copy back noted on the other stream", _OneForBoth),
    Mutant("copies on a stream that waits for nothing", _Elsewhere),
    Mutant("copies that block the host", _Blocking),
    Mutant("a pool that is not pinned", _Unpinned),
    Mutant("nobody waits for copies", _NoWait),
    Mutant("the host waits for copies", _HostWaits),
    Mutant("the first mark serves for all", _StaleMark),
    Mutant("marks on the default stream", _MarksOnDefault),
    Mutant("memory of the copy stream", _AllocatesElsewhere),
    Mutant("a pool leased while the last step's copies run", swap=_PoolNotIdle),
    Mutant(
        "a pool given back by a stream that has not waited",
        patched=lambda: _lease_marks(torch.Stream(torch.device("fake:0"))),
    ),
    Mutant("readers do not wait for what comes back", patched=_unwaited()),
    Mutant("a free under a running copy", swap=_NothingHeld, patched=_unwaited()),
    Mutant(
        "a reload dies under its copy",
        swap=_NothingHeldIn,
        patched=_unwaited(_patch(PooledCopy, "settle", lambda copy: None)),
    ),
    Mutant(
        "all host copies at one address",
        patched=_patch(values, "place_host_copies", _first_address),
    ),
    Mutant("a reload over a live tensor of the arena", program=_reloads_at_the_bottom),
    Mutant("dropout drawn anew", patched=_patch(random_state.Replay, "__enter__", _not_rewound)),
    Mutant("the generator stays rewound", patched=_patch(random_state, "_restore", _not_restored)),
    Mutant("another device's generator", patched=_patch(random_state, "_generator", _zeros)),
)
