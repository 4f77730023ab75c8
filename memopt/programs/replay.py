"""THE cost semantics: a program's memory and time (docs/cost-model.md).

Memory is taken at every instruction. At a Compute it is resident + live tensors + every tensor the
operator writes (kept or transient, and once more if it is already live) + workspace, less the
storage that an output computed in place takes over. At the LossBoundary it is live + tangents + the
loss's own. A SwapIn occupies memory from that instruction on, and a SwapOut's device copy until its
Free. Time: the compute stream runs instructions in order; a transfer starts when its instruction is
reached, its data exist and its link is free. Before memory is released (Free, DropHost) the compute
stream waits for the tensor's transfer, and a Compute waits for the swap-ins it reads: a slow link
costs time, never memory. A Compute of a collective takes no time of the compute stream: it starts
the collective on the network, one at a time, and its result is live from then on. Its first reader
waits for it, and so does the Free of its operands and results. A movable tensor that the program
moves (`memopt.programs.moved`) has a host copy during the whole step, which its SwapOut overwrites.
If it stays on the device between steps, it is live before the first instruction and after the last.
No transfer is under way then, so the time of a step is also the time from one step to the next. A
Compute of an update on the host takes no time of the compute stream either: the host runs one at a
time, each once the copies that it reads are complete. The DropHost of its gradient waits for it.
Its workspace is host memory, for the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from memopt.errors import InvalidProgramError
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.models.last_of import LastOf
from memopt.models.variants import Variant, variant
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.lifetimes import bytes_during, lifetimes
from memopt.programs.link_clock import LinkClock
from memopt.programs.moved import carried_over, changed_by, host_scratch_bytes, moved_tensors


class Direction(StrEnum):
    """The route of a transfer."""

    TO_HOST = "to host"
    FROM_HOST = "from host"
    NETWORK = "network"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between device and host, collective, or update on the host, in [start_s, end_s).
    `tensor` is the collective's first result (-1: none), or the update's parameter."""

    instruction: int
    tensor: int
    direction: Direction
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory and the times of a replayed program. Tuples have one entry per instruction.

    Attributes:
        peak_bytes: the largest device memory, resident included.
        peak_instruction: the first instruction at which it is reached; None: no instruction.
        host_peak_bytes: the largest sum of host copies.
        time_s: end of the step: the compute stream and all transfers are done.
        step_bytes: device memory while the instruction runs (before a Free releases any).
        live_bytes: device memory after it: resident + live tensors.
        host_bytes: host memory after it.
        start_s: when the compute stream starts it, waits over.
        end_s: when the compute stream is done with it.
        stall_s: how long the compute stream waited for transfers and collectives before it.
        transfers: every copy, in the order of the program.
        arena_bytes: extent of the program's placement; None: it has none.
        placed_peak_bytes: the arena and the largest memory outside it (resident, workspace,
            tangents, lifetimes without an offset), the peak of an executor that allocates the
            arena once; None without a placement.
        collectives: every collective, in the order of the program.
        host_updates: every update on the host, in the order of the program.
    """

    peak_bytes: int
    peak_instruction: int | None
    host_peak_bytes: int
    time_s: float
    step_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    stall_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    arena_bytes: int | None = None
    placed_peak_bytes: int | None = None
    collectives: tuple[Transfer, ...] = ()
    host_updates: tuple[Transfer, ...] = ()

    @property
    def total_stall_s(self) -> float:
        """Time the compute stream spent waiting for transfers and collectives, seconds."""
        return sum(self.stall_s)


_REPLAYED = LastOf[Timeline]()


def replay(graph: Graph, program: Program, device: Device | None = None) -> Timeline:
    """Replay a program and return its memory and time.

    Args:
        graph: the cost model the program refers to.
        program: instructions; a valid program is expected (see `memopt.programs.validate`).
        device: link rates; None: transfers take no time.

    Raises:
        InvalidProgramError: an instruction that cannot be processed, such as a read of an
            absent tensor. Whole-program laws are the validator's.
    """
    # Without transfers the link is not asked.
    link = device if program.has_transfers else None
    return _REPLAYED.of((graph, program), link, lambda: _replayed(graph, program, link))


def _replayed(graph: Graph, program: Program, device: Device | None) -> Timeline:
    state = _Streams(graph, device, moved_tensors(graph, program))
    state.begin_with(carried_over(graph, program))
    if state.moved:
        state.copied_bytes += host_scratch_bytes(graph, program)
    for position, instruction in enumerate(program.instructions):
        try:
            state.run(position, instruction)
        except _Invalid as error:
            raise InvalidProgramError(f"instruction {position}, {instruction}: {error}") from None
    timeline = state.timeline()
    if program.offsets is None:
        return timeline
    arena_bytes = max(
        (offset + graph.tensors[tensor].size_bytes for _, tensor, offset in program.offsets),
        default=0,
    )
    outside = outside_bytes(graph, program, timeline.step_bytes)
    most_bytes = max(outside, default=graph.resident_bytes)
    return dataclasses.replace(
        timeline, arena_bytes=arena_bytes, placed_peak_bytes=arena_bytes + most_bytes
    )


def outside_bytes(graph: Graph, program: Program, step_bytes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the memory outside the arena while each instruction runs: all of it, less the
    lifetimes with an offset."""
    placed = {(position, tensor) for position, tensor, _ in program.offsets or ()}
    listed = (lifetime for lifetime in lifetimes(graph, program).device if lifetime.key in placed)
    inside_bytes = bytes_during(graph, listed, len(program))
    return tuple(total - inside for total, inside in zip(step_bytes, inside_bytes, strict=True))


class _Invalid(Exception):
    """The reason why an instruction cannot be processed."""


class _Streams(LinkClock):
    """The state of device, host and streams while a program is replayed."""

    def __init__(self, graph: Graph, device: Device | None, moved: frozenset[int]) -> None:
        super().__init__(device or Device())
        self.graph = graph
        self.sizes = [tensor.size_bytes for tensor in graph.tensors]
        self.moved = moved
        self.stale: set[int] = set()
        """Moved tensors with a newer value on the device than on the host."""
        self.resident = graph.resident - moved
        self.live: set[int] = set()
        self.host: set[int] = set(moved)
        self.leaving: set[int] = set()
        """Tensors whose device copy a SwapOut reads."""
        self.copied_bytes = sum(self.sizes[tensor] for tensor in moved)
        self.device_bytes = graph.resident_bytes - self.copied_bytes
        self.during_bytes = self.device_bytes
        self.transfers: list[Transfer] = []
        self.collectives: list[Transfer] = []
        self.host_updates: list[Transfer] = []
        self.rows: list[tuple[int, int, int, float, float, float]] = []

    def begin_with(self, tensors: Iterable[int]) -> None:
        """Begin with moved tensors on the device that the step before has changed."""
        for tensor in tensors:
            self._appear(tensor)
            self.stale.add(tensor)
        self.during_bytes = self.device_bytes

    def run(self, position: int, instruction: object) -> None:
        """Advance by one instruction and record its row."""
        self.wait_s = 0.0
        start_s: float | None = None
        if type(instruction) is Compute:
            start_s = self._compute(position, instruction)
        elif type(instruction) is Free:
            self._free(instruction.tensor)
        elif type(instruction) is SwapOut:
            self._swap_out(position, instruction.tensor)
        elif type(instruction) is SwapIn:
            self._swap_in(position, instruction.tensor)
        elif type(instruction) is DropHost:
            self._drop_host(instruction.tensor)
        elif type(instruction) is LossBoundary:
            self._boundary()
        else:
            raise _Invalid("not an instruction")
        self.rows.append(
            (
                self.during_bytes,
                self.device_bytes,
                self.copied_bytes,
                self.now_s if start_s is None else start_s,
                self.now_s,
                self.wait_s,
            )
        )

    def timeline(self) -> Timeline:
        """Return the rows recorded so far, as columns."""
        columns = tuple(zip(*self.rows, strict=True)) or ((),) * 6
        step_bytes, live_bytes, host_bytes, start_s, end_s, stall_s = columns
        peak = max(step_bytes, default=self.device_bytes)
        return Timeline(
            peak_bytes=peak,
            peak_instruction=step_bytes.index(peak) if step_bytes else None,
            host_peak_bytes=max(host_bytes, default=0),  # moved tensors have instructions
            time_s=max(
                self.now_s,
                self.network_free_s,
                self.host_free_s,
                *(x.end_s for x in self.transfers),
            ),
            step_bytes=step_bytes,
            live_bytes=live_bytes,
            host_bytes=host_bytes,
            start_s=start_s,
            end_s=end_s,
            stall_s=stall_s,
            transfers=tuple(self.transfers),
            collectives=tuple(self.collectives),
            host_updates=tuple(self.host_updates),
        )

    def _compute(self, position: int, instruction: Compute) -> float:
        if not 0 <= instruction.op < len(self.graph.operators):
            raise _Invalid("there is no such operator")
        operator = self.graph.operators[instruction.op]
        chosen = variant(operator, instruction.implementation)
        if chosen.on_host:
            return self._update_on_host(position, instruction, chosen)
        live, resident, arriving = self.live, self.resident, self.arrival_s
        for tensor in chosen.reads:
            if tensor not in live and tensor not in resident:
                raise _Invalid(f"{self._name(tensor)} is not on the device")
            if tensor in arriving:
                self.arrive(tensor)
        sizes = self.sizes
        self.during_bytes = (
            self.device_bytes + sum([sizes[t] for t in chosen.writes]) + chosen.workspace_bytes
        )
        if instruction.in_place is not None:
            self._take_over(instruction.in_place)
        for tensor in instruction.outputs:
            if tensor not in chosen.writes:
                raise _Invalid(f"the operator does not write {self._name(tensor)}")
            self._appear(tensor)
        if self.moved:
            changed = changed_by(self.graph, operator)
            self.stale.update(self.moved.intersection(changed))
        start_s = self.now_s
        if operator.collective is None:
            self.now_s += chosen.time_s
        else:
            self._send(position, instruction, chosen)
        return start_s

    def _send(self, position: int, instruction: Compute, chosen: Operator | Variant) -> None:
        """Start a collective. It is waited for at once if it has a workspace, which it would hold
        as long as it runs, or results that the program does not keep."""
        start_s, end_s = self.send(chosen.reads, instruction.outputs, chosen.time_s)
        result = chosen.writes[0] if chosen.writes else -1
        self.collectives.append(Transfer(position, result, Direction.NETWORK, start_s, end_s))
        if len(instruction.outputs) < len(chosen.writes) or chosen.workspace_bytes:
            self.wait(end_s)

    def _update_on_host(
        self, position: int, instruction: Compute, chosen: Operator | Variant
    ) -> float:
        """Start an update on the host."""
        reads = tuple(dict.fromkeys(self.graph.operators[instruction.op].reads))
        for tensor in reads:
            if tensor not in self.host:
                raise _Invalid(f"{self._name(tensor)} is not on the host")
            if tensor in self.moved and tensor in self.live:
                raise _Invalid(f"{self._name(tensor)} is on the device, too")
        start_s, end_s = self.on_host(reads, chosen.time_s)
        self.during_bytes = self.device_bytes
        changed = changed_by(self.graph, self.graph.operators[instruction.op])
        parameter = changed[0] if changed else -1
        self.host_updates.append(Transfer(position, parameter, Direction.HOST, start_s, end_s))
        return self.now_s

    def _take_over(self, tensor: int) -> None:
        """Hand the storage of a tensor over to the output."""
        if tensor not in self.live or tensor in self.leaving:
            raise _Invalid(f"{self._name(tensor)} cannot be overwritten")
        self.wait(self.sent_s.pop(tensor, self.now_s))
        self.live.remove(tensor)
        self.device_bytes -= self.sizes[tensor]
        self.during_bytes -= self.sizes[tensor]

    def _boundary(self) -> None:
        for tensor in self.graph.written_back:
            if tensor not in self.live:
                raise _Invalid(f"{self._name(tensor)} is not on the device")
            self.live.remove(tensor)
            self.device_bytes -= self.sizes[tensor]
        for tensor in self.graph.tangents:
            self._appear(tensor)
        self.during_bytes = self.device_bytes + self.graph.boundary_bytes

    def _free(self, tensor: int) -> None:
        if tensor not in self.live:
            raise _Invalid(f"{self._name(tensor)} is not on the device")
        if tensor in self.stale:
            raise _Invalid(f"the new value of {self._name(tensor)} would be lost")
        self.free(tensor)
        self.live.remove(tensor)
        self.during_bytes = self.device_bytes
        self.device_bytes -= self.sizes[tensor]

    def _swap_out(self, position: int, tensor: int) -> None:
        if tensor not in self.live:
            raise _Invalid(f"{self._name(tensor)} is not on the device")
        if tensor in self.host and tensor not in self.stale:
            raise _Invalid(f"{self._name(tensor)} is on the host already")
        # The data exist: the producer is done, or waited for if it is a collective. So is an
        # earlier swap-in: the DropHost of its host copy waited for it.
        self.arrive(tensor)
        start_s, end_s = self.copy_out(tensor, self.sizes[tensor])
        if tensor in self.moved:
            self.stale.remove(tensor)
        else:
            self.copied_bytes += self.sizes[tensor]
        self.host.add(tensor)
        self.leaving.add(tensor)
        self.during_bytes = self.device_bytes
        self.transfers.append(Transfer(position, tensor, Direction.TO_HOST, start_s, end_s))

    def _swap_in(self, position: int, tensor: int) -> None:
        if tensor not in self.host:
            raise _Invalid(f"{self._name(tensor)} is not on the host")
        self._appear(tensor)
        self.leaving.discard(tensor)
        # The host copy is complete: the device copy was freed, which waits.
        start_s, end_s = self.copy_back(tensor, self.sizes[tensor])
        self.during_bytes = self.device_bytes
        self.transfers.append(Transfer(position, tensor, Direction.FROM_HOST, start_s, end_s))

    def _drop_host(self, tensor: int) -> None:
        if tensor not in self.host:
            raise _Invalid(f"{self._name(tensor)} is not on the host")
        if tensor in self.moved:
            raise _Invalid(f"{self._name(tensor)} lives on the host")
        self.drop(tensor)
        self.host.remove(tensor)
        self.leaving.discard(tensor)
        self.copied_bytes -= self.sizes[tensor]
        self.during_bytes = self.device_bytes

    def _appear(self, tensor: int) -> None:
        if tensor in self.live:
            raise _Invalid(f"{self._name(tensor)} is on the device already")
        self.live.add(tensor)
        self.device_bytes += self.sizes[tensor]

    def _name(self, tensor: int) -> str:
        if 0 <= tensor < len(self.graph.tensors):
            return repr(self.graph.tensors[tensor].name)
        return f"tensor {tensor}"
