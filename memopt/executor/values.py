"""What a program needs at the edges of its two halves: live values, random operators, reads."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Node

from memopt.executor.host_pool import HostPlacement, place_host_copies
from memopt.models.variants import variant
from memopt.profiler.build import Lowering
from memopt.profiler.capture import Captured
from memopt.profiler.in_place import overwritable
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)


@dataclass(frozen=True)
class Halves:
    """A program split at its loss boundary, with what crosses it.

    Attributes:
        captured: the model's joint graph.
        lowering: the Graph's map to FX nodes.
        program: the plan.
    """

    captured: Captured
    lowering: Lowering
    program: Program

    @cached_property
    def boundary(self) -> int:
        """Index of the loss boundary; the number of instructions if there is none."""
        for i, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, LossBoundary):
                return i
        return len(self.program)

    @property
    def forward(self) -> tuple[Instruction, ...]:
        """Instructions before the loss boundary."""
        return self.program.instructions[: self.boundary]

    @property
    def backward(self) -> tuple[Instruction, ...]:
        """Instructions after the loss boundary."""
        return self.program.instructions[self.boundary + 1 :]

    @cached_property
    def repeated_random(self) -> frozenset[int]:
        """Random operators that run more than once: their generator state is kept."""
        runs = Counter(i.op for i in self.program if isinstance(i, Compute))
        operators = self.lowering.graph.operators
        return frozenset(op for op, n in runs.items() if n > 1 and operators[op].random)

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """Computed tensors that the backward half needs from the forward half's device memory,
        ascending. Outputs it does not read are the user's to hold."""
        wanted: set[int] = set()
        for instruction in self.backward:
            match instruction:
                case Compute(op, _, name):
                    wanted.update(variant(self.lowering.graph.operators[op], name).reads)
                case SwapOut(tensor):
                    wanted.add(tensor)
                case _:
                    pass
        for gradient in self.captured.gradients:
            if isinstance(gradient, Node):
                wanted.update(t for t in self.lowering.storages[gradient] if t is not None)
        return tuple(t for t in self._live_at_boundary if t in wanted)

    @cached_property
    def outputs_read_later(self) -> tuple[int, ...]:
        """Positions of the forward outputs whose memory the backward half reads, ascending."""
        storages = self.lowering.storages
        return tuple(
            position
            for position, output in enumerate(self.captured.forward_outputs)
            if isinstance(output, Node) and set(storages[output]) & set(self.carried)
        )

    @cached_property
    def _live_at_boundary(self) -> tuple[int, ...]:
        """Computed tensors on the device when the forward ends, ascending."""
        live: set[int] = set()
        for instruction in self.forward:
            match instruction:
                case Compute(_, outputs, _, in_place):
                    live.update(outputs)
                    if in_place is not None:
                        live.discard(in_place)
                case Free(tensor):
                    live.discard(tensor)
                case SwapIn(tensor):
                    live.add(tensor)
                case _:
                    pass
        return tuple(sorted(live))

    @cached_property
    def hosted_at_boundary(self) -> tuple[int, ...]:
        """Tensors with a host copy when the forward ends, ascending."""
        hosted: set[int] = set()
        for instruction in self.forward:
            match instruction:
                case SwapOut(tensor):
                    hosted.add(tensor)
                case DropHost(tensor):
                    hosted.discard(tensor)
                case _:
                    pass
        return tuple(sorted(hosted))

    @cached_property
    def host_placement(self) -> HostPlacement:
        """Addresses of the host copies in the pool."""
        return place_host_copies(self.lowering.graph, self.program)

    @cached_property
    def swaps_out_late(self) -> bool:
        """Whether the backward half moves something to the host."""
        return any(isinstance(i, SwapOut) for i in self.backward)

    @cached_property
    def saved_states(self) -> tuple[int, ...]:
        """Repeated random operators whose state must cross the boundary, ascending."""
        first = {i.op for i in self.forward if isinstance(i, Compute)}
        later = {i.op for i in self.backward if isinstance(i, Compute)}
        return tuple(sorted(self.repeated_random & first & later))

    @cached_property
    def backward_primals(self) -> frozenset[int]:
        """Positions of the primals that the backward half may read."""
        tensors = {
            tensor
            for i in self.backward
            if isinstance(i, Compute)
            for tensor in variant(self.lowering.graph.operators[i.op], i.implementation).reads
        }
        return frozenset(
            position
            for position, primal in enumerate(self.captured.primals)
            if self.lowering.storages[primal.node][0] in tensors
        )


def kernel_of(lowering: Lowering, node: Node) -> Node | None:
    """The kernel call that a getitem node unpacks; None for every other node."""
    if node.target is operator.getitem:
        parent = node.args[0]
        if isinstance(parent, Node) and parent not in lowering.views:
            return parent
    return None


def argument_in(lowering: Lowering, node: Node, tensor: int) -> Node:
    """The argument through which a kernel call may overwrite storage `tensor`."""
    return next(n for n in overwritable(node) if lowering.storages[n] == (tensor,))


def unpacked(lowering: Lowering, node: Node, kept: Iterable[int]) -> list[tuple[Any, Node, int]]:
    """(position in the kernel's result or None, the node that names it, tensor) of kept outputs
    of the kernel call `node`."""
    multiple = isinstance(node.meta.get("val"), (tuple, list))
    wanted = set(kept)
    found = []
    for position, tensor in enumerate(lowering.storages[node]):
        if tensor in wanted and tensor in lowering.bases:
            found.append((position if multiple else None, lowering.bases[tensor], tensor))
            wanted.discard(tensor)
    return found
