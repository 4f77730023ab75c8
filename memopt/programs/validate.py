"""The independent checker of programs: it accepts a program or returns its first violation.

It shares no code with replay, liveness or any strategy, and is organised the other way round,
as a reader would check a plan by hand: every tensor's own history is checked alone and gives
its lifetimes; memory at an instruction is then the sum over all lifetimes that cover it, and
addresses are compared pair by pair, O(n²) on purpose.

A lifetime (begin, end, ...) begins at the Compute, SwapIn or LossBoundary `begin` and ends with
the Free at `end`, with what takes its memory over there, or with the program. Violations are
looked for in four groups, each only if the one before is clean, and the earliest of its group is
returned: form, order and lifetimes, memory, addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memopt.models.budget import NO_LIMIT, Budget
from memopt.models.graph import Graph, Phase, TensorKind
from memopt.programs.instructions import (
    Compute,
    Instruction,
    LossBoundary,
    OfTensor,
    Program,
    SwapIn,
)
from memopt.programs.validate_moved import (
    HOST_CHANGE,
    HOST_READ,
    is_changed,
    moved_history,
    on_host,
)
from memopt.programs.validate_network import collectives_in_order
from memopt.programs.validate_placement import LiveRange, given_up, misplaced, tensors_of
from memopt.programs.violations import Violation as Violation
from memopt.programs.violations import ViolationCode as ViolationCode
from memopt.programs.violations import first

Code = ViolationCode


class Use(NamedTuple):
    """The device memory of a program: `during[i]` bytes while instruction i runs, `peak` the
    largest; `host[i]` and `host_peak` the same for host copies; `outside[i]` the part of
    `during[i]` that the program's placement does not cover."""

    peak: int
    host_peak: int
    during: list[int]
    host: list[int]
    outside: list[int]


def validate(
    graph: Graph,
    program: Program,
    budget: Budget = NO_LIMIT,
) -> Violation | None:
    """Check a program; None means that it is valid.

    Args:
        graph: the cost model the program refers to.
        program: the program, with its placement if it has one.
        budget: the program's limits. With a placement, the arena and everything outside it
            must fit on the device, too.

    Returns:
        The first violation, or None.
    """
    malformed = first(list(_malformed(graph, program.instructions)))
    if malformed:
        return malformed
    device, host, found = _lifetimes(graph, program.instructions)
    found = [
        *_order(graph, program.instructions),
        *_draws(graph, program.instructions),
        *collectives_in_order(graph, program.instructions),
        *_late_outputs(graph, program, device),
        *found,
    ]
    if found:
        return first(found)
    use = _use(graph, program, device, host)
    for limit, values, code in (
        (budget.device_bytes, use.during, Code.OVER_BUDGET),
        (budget.host_bytes, use.host, Code.OVER_HOST_BUDGET),
    ):
        for position, value in enumerate(values):
            if limit is not None and value > limit:
                return Violation(code, position, f"{value} bytes, {value - limit} too many")
    if program.offsets is None:
        return None
    return misplaced(graph, program, device, max(use.outside, default=0), budget.device_bytes)


def memory_use(graph: Graph, program: Program) -> Use:
    """Return the device and host memory of a valid program, summed over lifetimes.

    Independent of `replay`, with which it must agree.
    """
    device, host, _ = _lifetimes(graph, program.instructions)
    return _use(graph, program, device, host)


def _use(
    graph: Graph, program: Program, device: Sequence[LiveRange], host: Sequence[LiveRange]
) -> Use:
    sizes, length = [tensor.size_bytes for tensor in graph.tensors], len(program.instructions)
    placed = {(position, tensor) for position, tensor, _ in program.offsets or ()}
    whole = _covering(device, sizes, length)
    apart = [x for x in device if (x.begin, x.tensor) not in placed]
    unplaced, copies = _covering(apart, sizes, length), _covering(host, sizes, length)
    apart_ends = {(x.tensor, x.end) for x in apart}
    resident_bytes = graph.resident_bytes - sum(sizes[x.tensor] for x in host if x.begin < 0)
    host_scratch = max((on_host(graph, x) or 0 for x in program.instructions), default=0)
    during, outside, copied = [], [], []
    for i, instruction in enumerate(program.instructions):
        produced, scratch = _produced(graph, instruction)
        inside = sum(sizes[t] for t in produced if (i, t) in placed)
        new = scratch + sum(sizes[t] for t in produced)
        during.append(resident_bytes + whole[i] + new)
        outside.append(resident_bytes + unplaced[i] + new - inside)
        for t in given_up(graph, instruction):
            during[-1] -= sizes[t]
            # If both are placed, the output is in the arena and so was the tensor.
            outside[-1] -= sizes[t] if (t, i) in apart_ends else 0
        copied.append(host_scratch + copies[i + 1])
    return Use(max(during, default=resident_bytes), max(copied, default=0), during, copied, outside)


def _covering(lifetimes: Sequence[LiveRange], sizes: Sequence[int], length: int) -> list[int]:
    """Return, for each position, the bytes of the lifetimes that began before it and end at or
    after it."""
    change = np.zeros(length + 2, dtype=np.int64)
    size = np.array([sizes[x.tensor] for x in lifetimes], dtype=np.int64)
    # From the position after its begin (-1: before the program) to its end.
    np.add.at(change, np.array([x.begin + 1 for x in lifetimes], dtype=np.int64), size)
    np.add.at(change, np.array([x.end + 1 for x in lifetimes], dtype=np.int64), -size)
    found: list[int] = np.cumsum(change).tolist()
    return found


def _produced(graph: Graph, instruction: Instruction) -> tuple[Sequence[int], int]:
    """Return the tensors that an instruction allocates, and its workspace."""
    if isinstance(instruction, Compute):
        operator = graph.operators[instruction.op]
        _, writes, workspace = tensors_of(operator, instruction.implementation)
        return writes, workspace if on_host(graph, instruction) is None else 0
    if isinstance(instruction, SwapIn):
        return (instruction.tensor,), 0
    if isinstance(instruction, LossBoundary):
        return graph.tangents, graph.boundary_bytes
    return (), 0


def _malformed(graph: Graph, instructions: Sequence[object]) -> Iterator[Violation]:
    """Find instructions that name things the graph does not have, and a missing boundary."""
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Compute):
            yield from _malformed_compute(graph, i, instruction)
        elif isinstance(instruction, OfTensor):
            if not 0 <= instruction.tensor < len(graph.tensors):
                yield Violation(Code.UNKNOWN_TENSOR, i, f"{instruction}")
            elif (
                graph.tensors[instruction.tensor].resident
                and instruction.tensor not in graph.movable
            ):
                name = graph.tensors[instruction.tensor].name
                yield Violation(Code.RESIDENT_MOVED, i, f"{instruction}: {name!r} is resident")
        elif not isinstance(instruction, LossBoundary):
            yield Violation(Code.UNKNOWN_INSTRUCTION, i, f"{instruction!r}")
    if any(isinstance(instruction, LossBoundary) for instruction in instructions):
        return
    if graph.tangents:
        yield Violation(Code.NO_LOSS_BOUNDARY, len(instructions), "the tangents never arrive")
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Compute) and 0 <= instruction.op < len(graph.operators):
            operator = graph.operators[instruction.op]
            if operator.phase is not Phase.FORWARD:
                yield Violation(Code.NO_LOSS_BOUNDARY, i, f"{operator.name!r} needs one")


def _malformed_compute(graph: Graph, i: int, instruction: Compute) -> Iterator[Violation]:
    if not 0 <= instruction.op < len(graph.operators):
        yield Violation(Code.UNKNOWN_OPERATOR, i, f"operator {instruction.op}")
        return
    operator = graph.operators[instruction.op]
    name, ways = instruction.implementation, {x.name: x.in_place for x in operator.implementations}
    if name is not None and name not in ways:
        message = f"{operator.name!r} has no {instruction.implementation!r}"
        yield Violation(Code.UNKNOWN_IMPLEMENTATION, i, message)
        return
    _, writes, _ = tensors_of(operator, instruction.implementation)
    for position, tensor in enumerate(instruction.outputs):
        if tensor not in writes:
            message = f"{operator.name!r} does not write tensor {tensor}"
            yield Violation(Code.OUTPUT_NOT_WRITTEN, i, message)
        elif tensor in instruction.outputs[:position]:
            yield Violation(Code.OUTPUT_REPEATED, i, f"{operator.name!r}, tensor {tensor}")
    over = instruction.in_place
    if over is not None and over not in (operator.in_place if name is None else ways[name]):
        yield Violation(Code.IN_PLACE, i, f"{operator.name!r} cannot overwrite tensor {over}")


def _order(graph: Graph, instructions: Sequence[Instruction]) -> Iterator[Violation]:
    """Check the order of operators: the loss boundary, effects, single runs, and updates."""
    boundaries = [i for i, x in enumerate(instructions) if isinstance(x, LossBoundary)]
    for i in boundaries[1:]:
        yield Violation(Code.SECOND_LOSS_BOUNDARY, i, f"the first is {boundaries[0]}")
    ran: set[int] = set()
    updated: set[int] = set()
    for i, instruction in enumerate(instructions):
        if not isinstance(instruction, Compute):
            continue
        operator = graph.operators[instruction.op]
        if operator.phase is not Phase.FORWARD and i < boundaries[0]:
            yield Violation(Code.BACKWARD_BEFORE_BOUNDARY, i, f"{operator.name!r}")
        if not operator.recomputable and instruction.op in ran:
            yield Violation(Code.NOT_RECOMPUTABLE, i, f"{operator.name!r}")
        ran.add(instruction.op)
        reads, _, _ = tensors_of(operator, instruction.implementation)
        if on_host(graph, instruction) is not None:
            reads = operator.reads
        parameters = {t for t in reads if graph.tensors[t].kind is TensorKind.PARAMETER}
        if operator.phase is not Phase.UPDATE and parameters & updated:
            yield Violation(Code.READ_AFTER_UPDATE, i, f"{operator.name!r}")
        # An update that writes no tensor of its own changes its parameters in place.
        if operator.phase is Phase.UPDATE and not operator.writes:
            updated |= parameters
    for index, operator in enumerate(graph.operators):
        # Drawing is an effect: it moves the generator for all later draws.
        acts = operator.phase is Phase.UPDATE or operator.random or not operator.writes
        # The other ranks wait for a collective.
        acts = acts or operator.collective is not None
        if acts and index not in ran:
            yield Violation(Code.OPERATOR_MISSING, len(instructions), f"{operator.name!r}")


def _draws(graph: Graph, instructions: Sequence[Instruction]) -> Iterator[Violation]:
    """Check the order of random draws: operators share one generator, so each draws its unplanned
    numbers only if their first runs keep the graph's order. (A later run repeats the first one's
    draws and leaves the generator alone.) The user's loss may draw between forward and backward."""
    drawn: set[int] = set()
    in_forward = True
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, LossBoundary):
            in_forward = False
        if not isinstance(instruction, Compute) or instruction.op in drawn:
            continue
        operator = graph.operators[instruction.op]
        if not operator.random:
            continue
        if drawn and max(drawn) > instruction.op:
            later = graph.operators[max(drawn)]
            message = f"{operator.name!r} after {later.name!r}"
            yield Violation(Code.RANDOM_ORDER, i, message)
        if operator.phase is Phase.FORWARD and not in_forward:
            yield Violation(Code.RANDOM_AFTER_LOSS, i, f"{operator.name!r}")
        drawn.add(instruction.op)


def _late_outputs(
    graph: Graph, program: Program, lifetimes: Sequence[LiveRange]
) -> Iterator[Violation]:
    """Check that the forward's outputs are live at the boundary, where the loss reads them."""
    made = {t for x in graph.operators if x.phase is Phase.FORWARD for t in x.writes}
    for i, instruction in enumerate(program.instructions):
        if not isinstance(instruction, LossBoundary):
            continue
        live = {x.tensor for x in lifetimes if x.begin < i <= x.end}
        for tensor in graph.outputs:
            if tensor in made and tensor not in live:
                name = graph.tensors[tensor].name
                yield Violation(Code.RESULT_MISSING, i, f"{name!r} at the loss boundary")


def _lifetimes(
    graph: Graph, instructions: Sequence[Instruction]
) -> tuple[list[LiveRange], list[LiveRange], list[Violation]]:
    """Return every tensor's lifetimes on the device and on the host, and their violations."""
    histories: list[list[tuple[int, str]]] = [[] for _ in graph.tensors]
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Compute):
            reads, _, _ = tensors_of(graph.operators[instruction.op], instruction.implementation)
            if on_host(graph, instruction) is not None:
                for tensor in graph.operators[instruction.op].reads:
                    resident = graph.tensors[tensor].resident
                    histories[tensor].append((i, HOST_CHANGE if resident else HOST_READ))
            for tensor in reads:
                histories[tensor].append((i, "read"))
                if is_changed(graph, graph.operators[instruction.op], tensor):
                    histories[tensor].append((i, "change"))
            if instruction.in_place is not None:
                histories[instruction.in_place].append((i, "overwrite"))
            for tensor in instruction.outputs:
                histories[tensor].append((i, "produce"))
        elif isinstance(instruction, LossBoundary):
            for tensor in graph.written_back:
                histories[tensor].append((i, "written back"))
            for tensor in graph.tangents:
                histories[tensor].append((i, "produce"))
        else:
            histories[instruction.tensor].append((i, type(instruction).__name__))
    device, host, found = list[LiveRange](), list[LiveRange](), list[Violation]()
    held = graph.tangents if graph.tangents_held else ()
    results = frozenset((*graph.outputs, *graph.gradients, *held))
    for tensor, history in enumerate(histories):
        moved = moved_history(graph, tensor, history, len(instructions))
        if moved or not graph.tensors[tensor].resident:
            life = moved or _History(graph, tensor, len(instructions), tensor in results)
            for i, event in history:
                life.step(i, event)
            life.finish()
            device += life.device
            host += life.host
            found += life.found
    return device, host, found


class _History:
    """The history of one tensor, from the program's first instruction to its last."""

    def __init__(self, graph: Graph, tensor: int, length: int, result: bool) -> None:
        self.name = graph.tensors[tensor].name
        self.tensor = tensor
        self.length = length
        self.result = result
        self.stays = result and tensor not in graph.written_back
        self.device: list[LiveRange] = []
        self.host: list[LiveRange] = []
        self.found: list[Violation] = []
        self.live_since: int | None = None
        self.copied_since: int | None = None

    def step(self, i: int, event: str) -> None:
        """Check one event and follow it as far as it makes sense."""
        live, copied = self.live_since is not None, self.copied_since is not None
        if event == "read":
            self._need(live, Code.READ_ON_HOST if copied else Code.READ_ABSENT, i)
        elif event == HOST_READ:
            self._need(copied, Code.HOST_READ_ABSENT, i)
        elif event == "produce":
            self._need(not live, Code.COMPUTED_WHILE_LIVE, i)
            self.live_since = i
        elif event == "Free":
            self._need(live, Code.FREED_ABSENT, i)
            self._need(not self.result, Code.RESULT_FREED, i)
            self._end_device(i)
        elif event == "overwrite":
            # If the tensor is absent, its reading is a violation already. A copy of this very
            # lifetime may still be under way.
            since, copy = self.live_since, self.copied_since
            leaving = since is not None and copy is not None and copy > since
            self._need(not self.result and not leaving, Code.IN_PLACE, i)
            self._end_device(i)
        elif event == "written back":
            self._end_device(i)  # where it is absent, see `_late_outputs`
        elif event == "SwapOut":
            self._need(live, Code.SWAP_OUT_ABSENT, i)
            self._need(not copied, Code.SWAP_OUT_TWICE, i)
            self.copied_since = i
        elif event == "SwapIn":
            self._need(copied, Code.SWAP_IN_ABSENT, i)
            self._need(not live, Code.SWAP_IN_WHILE_LIVE, i)
            self.live_since = i
        elif event == "DropHost":
            self._need(copied, Code.DROP_HOST_ABSENT, i)
            self._end_host(i)

    def finish(self) -> None:
        """Check the tensor's state at the end of the program."""
        if self.stays:
            self._need(self.live_since is not None, Code.RESULT_MISSING, self.length)
        else:
            self._need(self.live_since is None, Code.LEFT_ON_DEVICE, self.length)
        self._need(self.copied_since is None, Code.LEFT_ON_HOST, self.length)
        self._end_device(self.length)
        self._end_host(self.length)

    def _need(self, condition: bool, code: ViolationCode, i: int) -> None:
        if not condition:
            self.found.append(Violation(code, i, f"{self.name!r}"))

    def _end_device(self, i: int) -> None:
        if self.live_since is not None:
            self.device.append(LiveRange(self.tensor, self.live_since, i))
        self.live_since = None

    def _end_host(self, i: int) -> None:
        if self.copied_since is not None:
            self.host.append(LiveRange(self.tensor, self.copied_since, i))
        self.copied_since = None
