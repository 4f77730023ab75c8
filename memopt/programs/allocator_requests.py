"""A program's requests to CUDA's caching allocator, and the memory reserved for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from memopt.models.graph import Graph
from memopt.programs.allocator_settings import AllocatorSettings
from memopt.programs.caching_allocator import CachingAllocator
from memopt.programs.instructions import Program
from memopt.programs.moved import carried_over, resident_under

STEPS = 2
"""Steps that are replayed: a second one finds the cache as the first has left it."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for `size_bytes` under an unused name, on a stream."""

    id: Hashable
    size_bytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Give back the block that was allocated under this name."""

    id: Hashable


Event: TypeAlias = Allocate | Release


@dataclass(frozen=True, slots=True)
class AllocatorFigures:
    """Peaks of the bytes in use (in whole blocks) and of those held from the device.

    Attributes:
        allocated_peak_bytes: as `torch.cuda.max_memory_allocated` counts.
        reserved_peak_bytes: as `torch.cuda.max_memory_reserved` counts.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int

    @property
    def fragmentation(self) -> float:
        """(reserved - allocated) / reserved, of the peaks, as OLLA §5.4 measures it."""
        if not self.reserved_peak_bytes:
            return 0.0
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes


def replay_allocations(
    events: Iterable[Event], settings: AllocatorSettings | None = None
) -> AllocatorFigures:
    """Return the peaks of requests, from an empty allocator.

    Raises:
        ValueError: a name is allocated twice, or a size is negative.
        MemoryError: a request does not fit the settings' capacity.
    """
    allocator = CachingAllocator(settings)
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.id, event.size_bytes, event.stream)
        else:
            allocator.release(event.id)
    return AllocatorFigures(allocator.allocated_peak_bytes, allocator.reserved_peak_bytes)


def reserved_by(
    graph: Graph, program: Program, settings: AllocatorSettings | None = None
) -> AllocatorFigures:
    """Return the figures for steps of a program, in a process that allocates nothing else.

    Raises:
        MemoryError: a request does not fit the settings' capacity.
    """
    return replay_allocations(allocation_trace(graph, program, STEPS), settings)


def allocation_trace(graph: Graph, program: Program, steps: int = 1) -> Iterator[Event]:
    """List the requests of a valid program to the allocator, instruction by instruction.

    Resident tensors come first, without those that the program moves, and resident bytes without
    a tensor (`extra_resident_bytes`) in one block. A Compute allocates its outputs, then its
    workspace, and frees that and its transient outputs when it ends. Placed lifetimes are in one
    block of the arena's size, requested when a step begins, as are tensors that stay on the device
    from the step before. All requests are on the compute stream: swap-ins take their memory there,
    too, and copies wait for it. A step's remaining blocks are freed before the next one."""
    for tensor in sorted(resident_under(graph, program)):
        yield Allocate(("resident", tensor), graph.tensors[tensor].size_bytes)
    yield Allocate("resident", graph.extra_resident_bytes)
    for _ in range(steps):
        yield from _step(graph, program)


def _step(graph: Graph, program: Program) -> Iterator[Event]:
    placed = {(position, tensor) for position, tensor, _ in program.offsets or ()}
    if program.offsets is not None:
        sizes = (offset + graph.tensors[t].size_bytes for _, t, offset in program.offsets)
        yield Allocate("arena", max(sizes, default=0))
    block: dict[int, tuple[int, int]] = {}
    """Live tensor → its block: the instruction and the tensor that it was requested for."""
    for tensor in carried_over(graph, program):
        block[tensor] = (-1, tensor)
        yield Allocate((-1, tensor), graph.tensors[tensor].size_bytes)
    for position, instruction in enumerate(program):
        effects = instruction.effects(graph)
        taken = effects.overwrites
        for tensor in effects.ends:
            if tensor != taken and tensor in block:
                yield Release(block.pop(tensor))
        made = None if taken is None else effects.writes[0]
        for tensor in effects.begins:
            if tensor == made and taken in block:
                block[tensor] = block.pop(taken)
            elif (position, tensor) not in placed:
                block[tensor] = (position, tensor)
                yield Allocate((position, tensor), graph.tensors[tensor].size_bytes)
        passing = [
            tensor
            for tensor in set(effects.writes).difference(effects.begins)
            if tensor != made and (position, tensor) not in placed
        ]
        for tensor in passing:
            yield Allocate((position, tensor), graph.tensors[tensor].size_bytes)
        if effects.workspace_bytes:
            yield Allocate("workspace", effects.workspace_bytes)
            yield Release("workspace")
        for tensor in passing:
            yield Release((position, tensor))
        if taken in block:
            yield Release(block.pop(taken))
    for left in block.values():
        yield Release(left)
    if program.offsets is not None:
        yield Release("arena")
