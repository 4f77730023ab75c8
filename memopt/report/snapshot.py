"""A plan's memory as a snapshot that PyTorch's memory visualiser opens (pytorch.org/memory_viz).

The format is that of `torch.cuda.memory._snapshot()`, pickled: events ("alloc", "free_requested",
"free_completed") in the order of the step, and the segments with the blocks that are live at its
end. Resident tensors are live from the start: they have blocks and no events. In each block's
frame, module and operator stand in place of file and function.

Tensors with planned addresses are at these, in a segment of their own. All others are placed by
first fit in the order of the step, which says nothing about a real allocator.
"""

from __future__ import annotations

import pickle
from bisect import insort
from os import PathLike
from typing import Any

from memopt.models.device import Device
from memopt.models.folders import write_whole
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import Lifetime, lifetimes
from memopt.programs.moved import resident_under
from memopt.programs.placed import first_fit
from memopt.programs.replay import Timeline, replay

RESIDENT, ARENA, POOL = 0x7F0000000000, 0x7F4000000000, 0x7F8000000000
"""First addresses of the segments: resident tensors, the plan's arena, everything else."""

Frames = list[dict[str, Any]]


def memory_snapshot(graph: Graph, program: Program, device: Device | None = None) -> dict[str, Any]:
    """Make the snapshot. Its allocated bytes are the replay's memory at every instruction."""
    made = _Snapshot(graph, program, replay(graph, program, device))
    made.run()
    return {
        "device_traces": [made.events],
        "segments": made.segments(),
        "allocator_settings": {},
        "external_annotations": [],
    }


def write_snapshot(
    path: str | PathLike[str], graph: Graph, program: Program, device: Device | None = None
) -> None:
    """Write a snapshot to a file, ".pickle"."""
    write_whole(path, pickle.dumps(memory_snapshot(graph, program, device)))


class _Snapshot:
    def __init__(self, graph: Graph, program: Program, timeline: Timeline) -> None:
        self.graph, self.program, self.timeline = graph, program, timeline
        self.events: list[dict[str, Any]] = []
        self.pool: list[tuple[int, int]] = []
        """Occupied intervals of the pool, ascending."""
        self.highest = 0
        self.blocks: dict[int, tuple[int, Frames]] = {}
        """Address → size and frames of each allocated block that is not resident."""
        self.offsets = {(i, tensor): offset for i, tensor, offset in program.offsets or ()}
        self.runs = dict(program.computes)

    def run(self) -> None:
        """Record every event of the step."""
        found = lifetimes(self.graph, self.program).device
        begins: dict[int, list[Lifetime]] = {}
        ends: dict[int, list[Lifetime]] = {}
        for lifetime in found:
            begins.setdefault(lifetime.begin, []).append(lifetime)
            if lifetime.freed or lifetime.overwritten:
                ends.setdefault(lifetime.end, []).append(lifetime)
        where = {one.key: self._allocate(0, one) for one in begins.get(-1, ())}
        for position, instruction in enumerate(self.program):
            for lifetime in ends.get(position, ()):
                self._free(position, where.pop(lifetime.key))
            for lifetime in begins.get(position, ()):
                where[lifetime.key] = self._allocate(position, lifetime)
            workspace_bytes = instruction.effects(self.graph).workspace_bytes
            if workspace_bytes:
                frames = self._frames(position, "workspace")
                self._free(position, self._take(position, workspace_bytes, frames))
            for lifetime in begins.get(position, ()):
                if lifetime.transient:
                    self._free(position, where.pop(lifetime.key))

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments, with the blocks that are allocated at the end of the step."""
        rows: dict[int, tuple[int, Frames]] = {}
        address = RESIDENT
        resident = resident_under(self.graph, self.program)
        for tensor in (self.graph.tensors[t] for t in sorted(resident)):
            if tensor.size_bytes:
                rows[address] = (tensor.size_bytes, [_frame(str(tensor.kind), tensor.name)])
            address += tensor.size_bytes
        rows[address] = (self.graph.extra_resident_bytes, [_frame("resident", "beside the graph")])
        pool = {at: row for at, row in self.blocks.items() if at >= POOL}
        arena = {at: row for at, row in self.blocks.items() if at < POOL}
        extent = self.timeline.arena_bytes or 0
        listed = (
            _segment(RESIDENT, sum(size for size, _ in rows.values()), rows),
            _segment(ARENA, extent, arena),
            _segment(POOL, self.highest, pool),
        )
        return [segment for segment in listed if segment["total_size"]]

    def _allocate(self, position: int, lifetime: Lifetime) -> int:
        """Allocate a lifetime that begins, and return its address; -1 if it has no bytes."""
        tensor = self.graph.tensors[lifetime.tensor]
        frames = self._frames(position, tensor.name)
        offset = self.offsets.get(lifetime.key)
        if offset is not None and tensor.size_bytes:
            return self._enter(position, ARENA + offset, tensor.size_bytes, frames)
        return self._take(position, tensor.size_bytes, frames)

    def _take(self, position: int, size_bytes: int, frames: Frames) -> int:
        if not size_bytes:
            return -1
        offset = first_fit(self.pool, size_bytes)
        insort(self.pool, (offset, offset + size_bytes))
        self.highest = max(self.highest, offset + size_bytes)
        return self._enter(position, POOL + offset, size_bytes, frames)

    def _enter(self, position: int, address: int, size_bytes: int, frames: Frames) -> int:
        self.blocks[address] = (size_bytes, frames)
        self._event(position, "alloc", address, size_bytes, frames)
        return address

    def _free(self, position: int, address: int) -> None:
        if address < 0:
            return
        size_bytes, frames = self.blocks.pop(address)
        if address >= POOL:
            self.pool.remove((address - POOL, address - POOL + size_bytes))
        for action in ("free_requested", "free_completed"):
            self._event(position, action, address, size_bytes, frames)

    def _event(
        self, position: int, action: str, address: int, size_bytes: int, frames: Frames
    ) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size_bytes,
                "stream": 0,
                "time_us": round(1e6 * self.timeline.start_s[position]),
                "frames": frames,
            }
        )

    def _frames(self, position: int, name: str) -> Frames:
        run = self.runs.get(position)
        if run is None:
            what = self.program.instructions[position].label(self.graph)
            return [_frame(what, name, position)]
        operator = self.graph.operators[run.op]
        return [_frame(operator.name, name, position), _frame(operator.module, operator.name)]


def _frame(filename: str, name: str, line: int = 0) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _segment(
    address: int, size_bytes: int, allocated: dict[int, tuple[int, Frames]]
) -> dict[str, Any]:
    """Make a segment; the gaps between its blocks are inactive blocks."""
    blocks: list[dict[str, Any]] = []
    at = address
    for start, (size, frames) in sorted(allocated.items()):
        if start > at:
            blocks.append(_block(at, start - at, "inactive", []))
        if size:
            blocks.append(_block(start, size, "active_allocated", frames))
        at = start + size
    if at < address + size_bytes:
        blocks.append(_block(at, address + size_bytes - at, "inactive", []))
    allocated_bytes = sum(size for size, _ in allocated.values())
    return {
        "device": 0,
        "address": address,
        "total_size": size_bytes,
        "allocated_size": allocated_bytes,
        "active_size": allocated_bytes,
        "requested_size": allocated_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size_bytes: int, state: str, frames: Frames) -> dict[str, Any]:
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": size_bytes,
        "state": state,
        "frames": frames,
    }
