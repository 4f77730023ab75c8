"""Shorter lifetimes of moved tensors in the same time: room for a placement.

A program may free a tensor long after its copy to the host is complete, and fetch it long before
its reader. Both cost nothing while there is memory, and keep it full: at addresses, where
lifetimes must fit into each other, that leaves no room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.program import Compute, DropHost, Free, Instruction, Program, SwapIn, SwapOut
from memopt.models.replay import Direction, replay
from memopt.models.variants import variant


def shortened(graph: Graph, program: Program, device: Device) -> Program:
    """Free tensors as early, and fetch them as late, as takes no longer by the device's links.

    Every lifetime lies within the one it had, and every computation and copy to the host starts
    when it did, in the order they had: peak and time are never worse.

    Args:
        graph: the cost model of the program.
        program: valid; its placement, if any, is dropped.
        device: link rates.

    Returns:
        The program; the instructions as they were, where nothing moves.
    """
    freed = _Shortening(graph, Program(program.instructions), device).freed_early()
    return _Shortening(graph, freed, device).fetched_late()


class _Shortening:
    """A program with its times. A position is that of the instruction that something precedes."""

    def __init__(self, graph: Graph, program: Program, device: Device) -> None:
        self.program = program
        self.device = device
        self.timeline = replay(graph, program, device)
        self.reached_s = [0.0, *self.timeline.end_s]
        """Of each position."""
        self.uses = _uses(graph, program)

    def freed_early(self) -> Program:
        """Each Free after the last use of its tensor, once transfers of that are complete when
        the next instruction starts."""
        moves = {}
        complete_s: dict[int, float] = {}
        """Tensor → end of its latest transfer."""
        started_s = list(map(self._started_s, range(len(self.program))))
        end_s = {transfer.instruction: transfer.end_s for transfer in self.timeline.transfers}
        for position, instruction in enumerate(self.program):
            if isinstance(instruction, SwapOut | SwapIn):
                complete_s[instruction.tensor] = end_s[position]
            elif isinstance(instruction, Free):
                uses = self.uses[instruction.tensor]
                last = uses[bisect_left(uses, position) - 1]
                ready_s = complete_s.get(instruction.tensor, 0.0)
                new = max(last + 1, bisect_left(started_s, ready_s))
                if new < position:
                    moves[position] = new
        return self._moved(moves)

    def fetched_late(self) -> Program:
        """Each SwapIn before the first use of its tensor, as late as the link allows if it and all
        later transfers are to be complete when they were waited for."""
        moves = {}
        start_s, most = float("inf"), len(self.program)
        """Of the next transfer on the link, and where it comes."""
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
        """The first use of a fetched tensor, and when that has waited for it."""
        uses = self.uses[tensor]
        after = bisect_right(uses, fetched)
        if after == len(uses):
            return len(self.program), self.timeline.time_s
        return uses[after], self._started_s(uses[after])

    def _started_s(self, position: int) -> float:
        """When an instruction has waited for what it waits for."""
        computes = isinstance(self.program.instructions[position], Compute)
        return (self.timeline.start_s if computes else self.timeline.end_s)[position]

    def _moved(self, moves: dict[int, int]) -> Program:
        """The program with some instructions elsewhere; those that come to one position keep
        their order."""
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
    """Tensor → the instructions that name it, or read or write it, ascending."""
    uses: dict[int, list[int]] = {}
    for position, instruction in enumerate(program):
        for tensor in dict.fromkeys(_used(graph, instruction)):
            uses.setdefault(tensor, []).append(position)
    return uses


def _used(graph: Graph, instruction: Instruction) -> Iterator[int]:
    if isinstance(instruction, Compute):
        chosen = variant(graph.operators[instruction.op], instruction.implementation)
        yield from (*chosen.reads, *chosen.writes)
    elif isinstance(instruction, Free | SwapOut | SwapIn | DropHost):
        yield instruction.tensor
    else:
        yield from graph.tangents
