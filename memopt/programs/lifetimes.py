"""The lifetimes of a program's tensors, on the device and on the host, found in one walk.

Lifetimes are half-open intervals of positions in the program. The validator has its own walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memopt.models.graph import Graph
from memopt.programs.instructions import Free, Program
from memopt.programs.moved import carried_over

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(eq=False)
class Lifetime:
    """One tensor on the device, from the instruction `begin` until before `end`.

    Attributes:
        begin: the Compute, SwapIn or LossBoundary that makes it; -1: it stayed from the step
            before (`memopt.programs.moved.carried_over`).
        tensor: the tensor.
        end: its Free, the Compute that overwrites it, or the LossBoundary before which it is
            written back; the length of the program if it stays.
        transient: whether its operator writes it and the program does not keep it.
        overwrites: the lifetime whose storage it takes over, computed in place.
        readers: the Computes that read it and the SwapOuts that copy it, ascending.
        copied: whether a SwapOut copies it, for which its Free waits.
        overwritten: whether it takes no memory any more where it ends, as no Free ends it.
        stays: whether nothing ends it.
    """

    begin: int
    tensor: int
    end: int
    transient: bool = False
    overwrites: Lifetime | None = None
    readers: list[int] = field(default_factory=list)
    copied: bool = False
    overwritten: bool = False
    stays: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """(instruction, tensor), as in `Program.offsets`."""
        return self.begin, self.tensor

    @property
    def freed(self) -> bool:
        """Whether a Free ends it."""
        return not (self.transient or self.overwritten or self.stays)

    @property
    def until(self) -> int:
        """The first instruction during which it takes no memory: a Free releases memory only when
        it is over."""
        return self.end + self.freed

    def is_live_at(self, position: int) -> bool:
        """Return whether the tensor is on the device before an instruction and after it."""
        return not self.transient and self.begin < position <= self.end


class HostLifetime(NamedTuple):
    """One host copy of a tensor, from its SwapOut until before its DropHost, or to the end."""

    begin: int
    tensor: int
    end: int


class Lifetimes(NamedTuple):
    """Every lifetime of a program, in the order of their beginnings, tangents included. Host
    copies of moved tensors (`memopt.programs.moved`) are left out: they never end."""

    device: list[Lifetime]
    host: list[HostLifetime]


def lifetimes(graph: Graph, program: Program) -> Lifetimes:
    """Return the lifetimes of a valid program."""
    found = Lifetimes([], [])
    live: dict[int, Lifetime] = {}
    hosted: dict[int, int] = {}
    for tensor in carried_over(graph, program):
        live[tensor] = Lifetime(-1, tensor, len(program))
        found.device.append(live[tensor])
    for position, instruction in enumerate(program):
        reads, writes, begins, ends, overwrites, _, copies, drops = instruction.effects(graph)
        for tensor in dict.fromkeys(reads):
            if tensor in live:
                live[tensor].readers.append(position)
        taken: Lifetime | None = None
        for tensor in ends:
            ended = live.pop(tensor)
            ended.end, ended.stays = position, False
            ended.overwritten = not isinstance(instruction, Free)
            if tensor == overwrites:
                taken = ended
        for tensor in writes:
            if tensor in begins:
                made = live[tensor] = Lifetime(position, tensor, len(program))
                made.overwrites = taken if tensor == writes[0] else None
            else:
                made = Lifetime(position, tensor, position + 1, transient=True, stays=False)
            found.device.append(made)
        for tensor in copies:
            live[tensor].copied = True
            if tensor not in graph.resident:
                hosted[tensor] = position
        for tensor in drops:
            found.host.append(HostLifetime(hosted.pop(tensor), tensor, position))
    found.host.extend(HostLifetime(begin, t, len(program)) for t, begin in hosted.items())
    found.host.sort()
    return found


def live_bytes(lower: Ints, upper: Ints, size: Ints, points: int) -> Ints:
    """Return the bytes live at each of `points` time points, for intervals [lower, upper)."""
    change = np.zeros(points + 1, dtype=np.int64)
    np.add.at(change, lower, size)
    np.subtract.at(change, upper, size)
    return np.cumsum(change[:-1])


def bytes_during(graph: Graph, listed: Iterable[Lifetime], points: int) -> list[int]:
    """Return the bytes of lifetimes while each of `points` instructions runs, as `replay` does it:
    a Free releases memory when it is over; an output computed in place adds none."""
    rows = [(max(0, x.begin), x.until, graph.tensors[x.tensor].size_bytes) for x in listed]
    lower, upper, size = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    found: list[int] = live_bytes(lower, upper, size, points).tolist()
    return found


@dataclass(frozen=True, slots=True)
class Storage:
    """Lifetimes that share one storage: each but the first is computed in place of the last."""

    lifetimes: tuple[Lifetime, ...]

    @property
    def first(self) -> Lifetime:
        """The lifetime that begins it."""
        return self.lifetimes[0]

    @property
    def end(self) -> int:
        """The first instruction at which it is not needed any more."""
        return self.lifetimes[-1].end

    @property
    def id(self) -> str:
        """The id of its `Buffer`: "instruction:tensor" of the first lifetime."""
        return f"{self.first.begin}:{self.first.tensor}"


def storages(listed: Sequence[Lifetime]) -> tuple[Storage, ...]:
    """Return the storages of lifetimes, in the order of their beginnings and tensors."""
    chains: dict[Lifetime, list[Lifetime]] = {}
    for lifetime in listed:
        chain = [] if lifetime.overwrites is None else chains.pop(lifetime.overwrites)
        chains[lifetime] = [*chain, lifetime]
    found = [Storage(tuple(chain)) for chain in chains.values()]
    return tuple(sorted(found, key=lambda storage: storage.first.key))
