"""Executors with one synchronization missing or wrong: each must be caught.

A mutant is a context in which memopt's own code is changed, or streams and swaps to run with
instead of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor

from memopt.executor import code_writer, values
from memopt.executor.swap_streams import PooledCopy, PoolLease, StreamSwap
from memopt.models.graph import Graph
from memopt.passes.passes import place_program
from memopt.programs import in_place
from memopt.programs.instructions import (
    Compute,
    DropHost,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from tests.races.judge import JudgedStreams


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
        name: what is wrong.
        streams: the streams to run with.
        swap: the swap to run with.
        patched: entered around planning and running.
        program: makes another program of a graph's valid one.
    """

    name: str
    streams: type[JudgedStreams] = JudgedStreams
    swap: type[StreamSwap] = StreamSwap
    patched: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    program: Callable[[Graph, Program], Program] = field(default=lambda _, program: program)

    def __str__(self) -> str:
        return self.name


class _OutBeforeProducer(JudgedStreams):
    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[int]) -> int:
        return super().copy(target, source, outward, () if outward else after)


class _InBeforeAllocation(JudgedStreams):
    """The reload's buffer is written while whoever had its memory before still runs."""

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[int]) -> int:
        return super().copy(target, source, outward, after if outward else after[1:])


class _EventBeforeCopy(JudgedStreams):
    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[int]) -> int:
        early = self.judge.record(self.stream(outward))
        super().copy(target, source, outward, after)
        return early


class _NoWait(JudgedStreams):
    def wait(self, event: int, home: str) -> None:
        pass


class _OnlyHereWaits(JudgedStreams):
    """The stream that made the memory does not wait when a copy dies under another."""

    def wait(self, event: int, home: str) -> None:
        self.judge.wait(self.here(), event)


class _StaleMark(JudgedStreams):
    """The event of the first mark serves for all."""

    def mark(self, home: str) -> int:
        if not hasattr(self, "first"):
            self.first = super().mark(home)
        return self.first


class _NewStreams(JudgedStreams):
    """A copy stream is made for each copy, and never given back."""

    count = itertools.count()

    def stream(self, outward: bool) -> str:
        return f"{super().stream(outward)} {next(self.count)}"


class _OneForBoth(JudgedStreams):
    """Copies back run on a stream that the events of the copies out never reach."""

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[int]) -> int:
        end = super().copy(target, source, outward, after)
        return end if outward else self.judge.record("out")


class _PoolNotIdle(StreamSwap):
    def lease(self) -> PoolLease:
        home = self._streams.here()
        pool = self._free.pop()[0] if self._free else self._streams.host_bytes(self.pool_bytes)
        return PoolLease(pool, self._streams, self._free, home)


class _NothingHeld(StreamSwap):
    """The device side of a copy under way may die with its last variable."""

    def out(self, tensor: Tensor, *args: Any) -> PooledCopy:
        copy = super().out(tensor, *args)
        copy.held = None
        return copy


class _NothingHeldIn(StreamSwap):
    def bring(self, copy: PooledCopy, into: Tensor | None = None) -> Tensor:
        made = super().bring(copy, into)
        copy.held = None
        return made


@contextlib.contextmanager
def _lease_marks(stream: Any) -> Iterator[None]:
    """The pool counts as idle once a stream has come here that never waited for its copies."""

    def give_back(lease: PoolLease) -> None:
        lease.free.append((lease.pool, lease.streams.mark(stream)))

    with mock.patch.object(PoolLease, "__del__", give_back):
        yield


def _no_wait(writer: Any, tensor: int) -> None:
    writer.swapping_in.discard(tensor)
    writer.swapping_out.discard(tensor)


@contextlib.contextmanager
def _no_waits_and(extra: AbstractContextManager[Any]) -> Iterator[None]:
    with mock.patch.object(code_writer.Writer, "arrive", _no_wait), extra:
        yield


def _first_address(graph: Any, program: Any) -> Any:
    """All host copies at the same address of the pool."""
    placed = _PLACE(graph, program)
    return replace(placed, offsets=dict.fromkeys(placed.offsets, 0))


_PLACE = values.place_host_copies


def _over_what_leaves(graph: Graph, program: Program) -> Program:
    """A result is computed over a tensor that is being copied to the host."""
    made = list(in_place.with_in_place(graph, program))
    position, taken = next(
        (i, one.in_place)
        for i, one in enumerate(made)
        if isinstance(one, Compute) and one.in_place is not None
    )
    made.insert(position, SwapOut(taken))
    made.insert(made.index(LossBoundary()), DropHost(taken))
    return Program(made)


def _reloads_at_the_bottom(graph: Graph, program: Program) -> Program:
    """What comes back is written at the arena's first address, whoever lives there."""
    placed = place_program(graph, program)[0]
    back = {i for i, one in enumerate(placed) if isinstance(one, SwapIn)}
    offsets = [(i, t, 0 if i in back else offset) for i, t, offset in placed.offsets or ()]
    return Program(placed.instructions, tuple(offsets))


def _patch(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


MUTANTS = (
    Mutant("a copy out before its producer's write", _OutBeforeProducer),
    Mutant("a reload buffer written while its memory is in use", _InBeforeAllocation),
    Mutant(
        "a free under a running copy",
        swap=_NothingHeld,
        patched=lambda: _no_waits_and(nullcontext()),
    ),
    Mutant("new streams at every call", _NewStreams),
    Mutant("an event recorded before the copy that it stands for", _EventBeforeCopy),
    Mutant("the end of a copy back noted on the other stream", _OneForBoth),
    Mutant("nobody waits for copies", _NoWait),
    Mutant("the compute stream waits for the first mark ever", _StaleMark),
    Mutant("readers do not wait for what comes back", patched=lambda: _no_waits_and(nullcontext())),
    Mutant(
        "a reload dies under its copy",
        swap=_NothingHeldIn,
        patched=lambda: _no_waits_and(mock.patch.object(PooledCopy, "settle")),
    ),
    Mutant(
        "all host copies at one address",
        patched=_patch(values, "place_host_copies", _first_address),
    ),
    Mutant("a pool leased while the last step's copies run", swap=_PoolNotIdle),
    Mutant(
        "a pool given back by a stream that has not waited",
        patched=lambda: _lease_marks("nobody's"),
    ),
    Mutant("a result written over a tensor on its way out", program=_over_what_leaves),
    Mutant("a reload over a live tensor of the arena", program=_reloads_at_the_bottom),
    Mutant("a step dropped under another stream, which alone waits", _OnlyHereWaits),
)
