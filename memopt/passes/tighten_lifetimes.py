"""Shortens lifetimes of moved tensors at little or no cost in time, which makes room for a
placement.

A program may free a tensor long after its copy to the host is complete, and fetch it long before
its reader. This costs nothing as long as memory suffices, but it keeps memory full, while tensors
with addresses need room between them. Where a link is busy all the time anyway, computations may
also wait for copies that memory alone does not make them wait for yet.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import Instruction, Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.replay import Direction, Transfer, replay


def tighten_lifetimes(
    graph: Graph, program: Program, device: Device, *, room_bytes: int | None = None
) -> Program:
    """Free tensors earlier and fetch them later, as far as that makes no step longer over the
    device's links.

    Every lifetime lies within the one it had: the peak is never larger. Without `room_bytes` every
    computation and copy to the host starts when it did, in the order they had.

    Args:
        graph: the cost model of the program.
        program: valid; its placement, if any, is dropped.
        device: link rates.
        room_bytes: the most memory, total, that a computation may need while copies to the host
            are under way: beyond it, the computation waits until they are complete and their
            tensors freed. The step may take longer; `replay` tells.

    Returns:
        The program; the same instructions if nothing moves.
    """
    own = _Tightening(graph, Program(program.instructions), device)
    return _Tightening(graph, own.freed_early(room_bytes), device).fetched_late()


class _Tightening:
    """Moves frees and fetches in a program by its times. Position p is before instruction p."""

    def __init__(self, graph: Graph, program: Program, device: Device) -> None:
        self.graph = graph
        self.program = program
        self.device = device
        self.timeline = replay(graph, program, device)
        self.reached_s = [0.0, *self.timeline.end_s]
        """When the compute stream reaches each position."""
        self.uses = _uses(graph, program)

    def freed_early(self, room_bytes: int | None) -> Program:
        """Move each Free to where the tensor's last use and its transfers are complete as the next
        instruction starts; or, if a computation needs more than `room_bytes`, to where it has
        waited for them."""
        freeable = self._freeable()
        moves: dict[int, int] = {}
        open_frees: list[tuple[float, int, int]] = []
        """Entries of `_freeable` whose tensors have no further use."""
        freed_bytes, ended = 0, Counter[int]()
        """Bytes freed earlier than before; bytes of them by the position where that ends."""
        waited_s = 0.0
        runs = {position for position, _ in self.program.computes}
        for position in range(len(self.program)):
            freed_bytes -= ended.pop(position, 0)
            for free in freeable.get(position, ()):
                heapq.heappush(open_frees, free)
            while open_frees:
                ready_s, free_at, tensor_bytes = open_frees[0]
                wait_s = ready_s - (self.timeline.start_s[position] + waited_s)
                if free_at > position and wait_s > 0:
                    held_bytes = self.timeline.step_bytes[position] - freed_bytes
                    full = room_bytes is not None and held_bytes > room_bytes
                    if not full or position not in runs:
                        break
                    waited_s += wait_s
                heapq.heappop(open_frees)
                if free_at > position:
                    moves[free_at] = position
                    freed_bytes += tensor_bytes
                    ended[free_at] += tensor_bytes
        return self._moved(moves)

    def _freeable(self) -> dict[int, list[tuple[float, int, int]]]:
        """Map the position after a tensor's last use to (when its transfers are complete, position
        of its Free, bytes), of each Free."""
        found: dict[int, list[tuple[float, int, int]]] = {}
        transfers: dict[int, list[Transfer]] = {}
        for transfer in self.timeline.transfers:
            transfers.setdefault(transfer.tensor, []).append(transfer)
        for lifetime in sorted(lifetimes(self.graph, self.program).device, key=lambda x: x.end):
            if lifetime.freed:
                tensor, freed_at = lifetime.tensor, lifetime.end
                uses = self.uses[tensor]
                last = uses[bisect_left(uses, freed_at) - 1]
                own = (x.end_s for x in transfers.get(tensor, ()) if x.instruction < freed_at)
                ready_s = max(own, default=0.0)
                tensor_bytes = self.graph.tensors[tensor].size_bytes
                found.setdefault(last + 1, []).append((ready_s, freed_at, tensor_bytes))
        return found

    def fetched_late(self) -> Program:
        """Move each SwapIn before its tensor's first use, as late as the link allows if it and all
        later transfers are still complete when they were waited for."""
        moves = {}
        start_s, most = float("inf"), len(self.program)
        """Start of the next transfer on the link, and its position."""
        for transfer in reversed(self.timeline.transfers):
            position = transfer.instruction
            if transfer.direction is Direction.TO_HOST:
                if not self.device.duplex:
                    start_s, most = transfer.start_s, position
                continue
            use, due_s = self._first_use(transfer.tensor, position)
            start_s = min(start_s, due_s) - (transfer.end_s - transfer.start_s)
            most = min(use, most, bisect_right(self.reached_s, start_s) - 1)
            if most > position:
                moves[position] = most
            most = max(most, position)
        return self._moved(moves)

    def _first_use(self, tensor: int, fetched: int) -> tuple[int, float]:
        """Return the first use of a fetched tensor, and when that use has waited for the fetch."""
        uses = self.uses[tensor]
        after = bisect_right(uses, fetched)
        if after == len(uses):
            return len(self.program), self.timeline.time_s
        return uses[after], self.timeline.start_s[uses[after]]

    def _moved(self, moves: dict[int, int]) -> Program:
        """Move some instructions; those that come to one position keep their order."""
        arriving: dict[int, list[Instruction]] = {}
        for old in sorted(moves):
            arriving.setdefault(moves[old], []).append(self.program.instructions[old])
        made: list[Instruction] = []
        for position, instruction in enumerate(self.program):
            made += arriving.get(position, ())
            if position not in moves:
                made.append(instruction)
        made += arriving.get(len(self.program), ())
        return Program(made)


def _uses(graph: Graph, program: Program) -> dict[int, list[int]]:
    """Map each tensor to the instructions that name, read or write it, ascending."""
    uses: dict[int, list[int]] = {}
    for position, instruction in enumerate(program):
        for tensor in instruction.effects(graph).touches:
            uses.setdefault(tensor, []).append(position)
    return uses
