"""The two halves of a program, and what crosses from one to the other: values, host copies and
states of the random generator."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.executor.absence import NOTHING_ABSENT, Uncomputed
from memopt.executor.graph_segments import Segments
from memopt.executor.random_state import RandomStates
from memopt.models.graph import Graph
from memopt.programs.first_half import first_half_end
from memopt.programs.in_place import taken_over
from memopt.programs.instructions import Instruction, Program
from memopt.programs.lifetimes import Lifetimes, lifetimes
from memopt.programs.moved import carried_over, moved_tensors
from memopt.programs.placed import first_fit
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.in_place import overwritable


@dataclass(frozen=True)
class Halves:
    """A program split at its loss boundary, with what crosses it.

    Attributes:
        captured: the model's joint graph.
        lowering: the Graph's map to FX nodes.
        program: the plan.
        absence: the part of the backward half that is skipped.
        together: position of an update → the positions of those that run with it, its own first.
        segments: where the halves are cut if they are captured; None: they are not to be.
    """

    captured: Captured
    lowering: Lowering
    program: Program
    absence: Uncomputed = NOTHING_ABSENT
    together: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    segments: Segments | None = None

    @property
    def gradients(self) -> tuple[Any, ...]:
        """The captured gradients, with None for those that are not computed."""
        absent = self.absence.nodes
        return tuple(None if g in absent else g for g in self.captured.gradients)

    @cached_property
    def boundary(self) -> int:
        """Index of the loss boundary; the number of instructions if there is none."""
        found = self.program.boundary
        return len(self.program) if found is None else found

    @property
    def forward(self) -> tuple[Instruction, ...]:
        """Instructions before the loss boundary."""
        return self.program.instructions[: self.boundary]

    @property
    def backward(self) -> tuple[Instruction, ...]:
        """Instructions after the loss boundary."""
        return self.program.instructions[self.boundary + 1 :]

    @cached_property
    def moved(self) -> frozenset[int]:
        """Tensors that live on the host between steps (`memopt.executor.homes`)."""
        return moved_tensors(self.lowering.graph, self.program)

    @cached_property
    def from_before(self) -> tuple[int, ...]:
        """Moved tensors that are on the device when a step begins."""
        return carried_over(self.lowering.graph, self.program)

    @cached_property
    def repeated_random(self) -> frozenset[int]:
        """Random operators that run more than once: their generator state is kept."""
        runs = Counter(run.op for _, run in self.program.computes)
        operators = self.lowering.graph.operators
        return frozenset(op for op, n in runs.items() if n > 1 and operators[op].random)

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """Computed tensors that the backward half needs from the forward half's device memory,
        ascending. Outputs that it does not read are the user's to hold."""
        wanted = set(self._read_in_backward)
        for gradient in (*self.captured.gradients, *self.captured.other_results):
            if isinstance(gradient, Node):
                wanted.update(t for t in self.lowering.storages[gradient] if t is not None)
        live = {x.tensor for x in self._lifetimes.device if x.is_live_at(self.boundary)}
        return tuple(sorted(live & wanted))

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Carried tensors that have a variable, ascending: what the forward saves begins with their
        values."""
        return tuple(tensor for tensor in self.carried if tensor in self.lowering.bases)

    def fork(self, saved: list[Any], placed: list[Any]) -> list[Any]:
        """Copy what is saved for a backward that may run again (retain_graph): the tensors whose
        memory the backward half takes for results of its own.

        Args:
            saved: what the forward has saved for the backward.
            placed: the same, with copies of what lies in an arena.
        """
        taken, forked = taken_over(self.backward), list(placed)
        for position, tensor in enumerate(self.saved):
            if tensor in taken and placed[position] is saved[position]:
                forked[position] = copied(saved[position])
        return forked

    @cached_property
    def complete_gradients(self) -> dict[int, tuple[int, ...]]:
        """Map positions of the program to the gradients (by their own positions) that are complete
        after them: the gradient's tensor is not used any more, nor is the parameter, which whoever
        gets the gradient may update. Gradients that are complete only at the end are left out."""
        last: dict[int, int] = {}
        for position, instruction in enumerate(self.backward, self.boundary + 1):
            last.update(dict.fromkeys(instruction.effects(self.lowering.graph).touches, position))
        storages = self.lowering.storages
        together: dict[int, list[int]] = {}
        for i, gradient in enumerate(self.captured.gradients):
            if isinstance(gradient, Node) and gradient.op == "call_function":
                for tensor in storages[gradient]:
                    if tensor is not None and not self.lowering.graph.tensors[tensor].resident:
                        together.setdefault(tensor, []).append(i)
        found: dict[int, tuple[int, ...]] = {}
        for tensor, positions in together.items():
            primals = [storages[self.captured.primals[i].node][0] for i in positions]
            ends = [last.get(one) for one in (tensor, *primals) if one is not None]
            after = max((end for end in ends if end is not None), default=self.boundary)
            if tensor in last:
                found[after] = (*found.get(after, ()), *positions)
        return dict(sorted(found.items()))

    @cached_property
    def first_half(self) -> dict[int, tuple[int, ...]]:
        """Map the last position of the backward's first half to the gradients of inputs, by their
        own positions. Empty: the backward has one half."""
        end = first_half_end(self.lowering.graph, self.program)
        primals = enumerate(self.captured.primals)
        own = tuple(i for i, primal in primals if not primal.held and self.gradients[i] is not None)
        return {end - 1: own} if end < len(self.program) else {}

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
    def hosted_at_boundary(self) -> tuple[int, ...]:
        """Tensors with a host copy when the forward ends, ascending."""
        hosted = (x.tensor for x in self._lifetimes.host if x.begin < self.boundary <= x.end)
        return tuple(sorted(hosted))

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return lifetimes(self.lowering.graph, self.program)

    @cached_property
    def _read_in_backward(self) -> frozenset[int]:
        """Tensors whose device copy the backward half reads."""
        effects = (instruction.effects(self.lowering.graph) for instruction in self.backward)
        return frozenset(tensor for one in effects for tensor in one.reads)

    @cached_property
    def host_placement(self) -> HostPlacement:
        """Addresses of the host copies in the pool."""
        return place_host_copies(self.lowering.graph, self.program)

    @cached_property
    def swaps_out_late(self) -> bool:
        """Whether the backward half moves a tensor to the host."""
        return any(copy.begin > self.boundary for copy in self._lifetimes.host)

    @cached_property
    def saved_states(self) -> tuple[int, ...]:
        """Repeated random operators whose state must cross the boundary, ascending."""
        first = {run.op for i, run in self.program.computes if i < self.boundary}
        later = {run.op for i, run in self.program.computes if i > self.boundary}
        return tuple(sorted(self.repeated_random & first & later))

    @cached_property
    def backward_primals(self) -> frozenset[int]:
        """Positions of the primals that the backward half may read."""
        return frozenset(
            position
            for position, primal in enumerate(self.captured.primals)
            if self.lowering.storages[primal.node][0] in self._read_in_backward
        )


@dataclass(frozen=True)
class Origin:
    """What a program's code is written of: its halves, and who makes its host copies and keeps its
    random states."""

    halves: Halves
    swap: Any
    random: RandomStates


def copied(value: Tensor) -> Tensor:
    """Copy all the memory of a tensor, and return the same view of it."""
    memory = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(memory, value.storage_offset(), value.shape, value.stride())


def kernel_of(lowering: Lowering, node: Node) -> Node | None:
    """Return the kernel call that a getitem node unpacks; None for every other node."""
    if node.target is operator.getitem:
        parent = node.args[0]
        if isinstance(parent, Node) and parent not in lowering.views:
            return parent
    return None


def base_of(lowering: Lowering, node: Node) -> Node:
    """Return the node whose variable has the storage of a node's tensor."""
    return lowering.bases[lowering.storages[node][0]]  # type: ignore[index]


def attribute_of(halves: Halves, node: Node) -> Any:
    """Return the attribute of the captured module that a get_attr node names."""
    return operator.attrgetter(str(node.target))(halves.captured.module)


def argument_in(lowering: Lowering, node: Node, tensor: int) -> Node:
    """Return the argument through which a kernel call may overwrite storage `tensor`."""
    return next(n for n in overwritable(node) if lowering.storages[n] == (tensor,))


def unpacked(lowering: Lowering, node: Node, kept: Iterable[int]) -> list[tuple[Any, Node, int]]:
    """Return (position in the kernel's result or None, the node that names it, tensor) of the kept
    outputs of the kernel call `node`."""
    multiple = isinstance(node.meta.get("val"), (tuple, list))
    wanted = set(kept)
    found = []
    for position, tensor in enumerate(lowering.storages[node]):
        if tensor in wanted and tensor in lowering.bases:
            found.append((position if multiple else None, lowering.bases[tensor], tensor))
            wanted.discard(tensor)
    return found


ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class HostPlacement:
    """The addresses of host copies in their pool.

    Attributes:
        offsets: tensor → offset of its host copies in the pool, bytes.
        extent_bytes: size of the pool.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    extent_bytes: int = 0


def place_host_copies(graph: Graph, program: Program) -> HostPlacement:
    """Place a program's host copies by first fit, in the best of four orders: by size, by bytes
    times lifetime, by end and by beginning. All but the last begin with the largest.

    Offsets and sizes are multiples of 512 bytes, so that copies of any dtype are aligned. The pool
    is as large as the most copies that live at once, unless they do not fit on top of each other.
    """
    copies = lifetimes(graph, program).host
    spans: dict[int, list[tuple[int, int]]] = {}
    for begin, tensor, end in copies:
        spans.setdefault(tensor, []).append((begin, end))
    sizes = {t: -(-graph.tensors[t].size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in spans}
    once = {t: sum(end - begin for begin, end in every) for t, every in spans.items()}
    ends = {t: every[-1][1] for t, every in spans.items()}
    begins = {t: every[0][0] for t, every in spans.items()}
    orders = (
        sorted(spans, key=lambda t: (-sizes[t], t)),
        sorted(spans, key=lambda t: (-sizes[t] * once[t], t)),
        sorted(spans, key=lambda t: (-ends[t], -sizes[t], t)),
        sorted(spans, key=lambda t: (begins[t], -sizes[t], t)),
    )
    least = max(
        (sum(sizes[t] for begin, t, end in copies if begin <= at < end) for at, *_ in copies),
        default=0,
    )
    best: HostPlacement | None = None
    for order in orders:
        found = _placed(order, spans, sizes)
        if best is None or found.extent_bytes < best.extent_bytes:
            best = found
        if best.extent_bytes == least:
            break
    assert best is not None
    return best


def _placed(
    order: list[int], spans: dict[int, list[tuple[int, int]]], sizes: dict[int, int]
) -> HostPlacement:
    offsets: dict[int, int] = {}
    for tensor in order:
        taken = [
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if any(a < d and c < b for a, b in spans[tensor] for c, d in spans[other])
        ]
        offsets[tensor] = first_fit(taken, sizes[tensor])
    return HostPlacement(offsets, max((offsets[t] + sizes[t] for t in offsets), default=0))
