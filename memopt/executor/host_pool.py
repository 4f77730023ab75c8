"""Addresses in the pinned host pool: one offset per tensor, its host copies never overlapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memopt.models.graph import Graph
from memopt.programs.instructions import DropHost, LossBoundary, Program, SwapOut

ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class HostPlacement:
    """Where host copies live.

    Attributes:
        offsets: tensor → offset of its host copies in the pool, bytes.
        extent_bytes: size of the pool.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    extent_bytes: int = 0


def place_host_copies(graph: Graph, program: Program) -> HostPlacement:
    """First fit by decreasing size, over the spans between SwapOut and DropHost.

    Offsets and sizes are multiples of 512 bytes, so that copies of any dtype are aligned.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    started: dict[int, int] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, SwapOut):
            started[instruction.tensor] = position
        elif isinstance(instruction, DropHost):
            start = started.pop(instruction.tensor)
            spans.setdefault(instruction.tensor, []).append((start, position))
    for tensor, start in started.items():
        spans.setdefault(tensor, []).append((start, len(program)))
    sizes = {t: -(-graph.tensors[t].size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in spans}
    # A retained graph reads what crossed the boundary again: nothing may come over it later.
    boundary = next((i for i, one in enumerate(program) if isinstance(one, LossBoundary)), 0)
    for tensor, found in spans.items():
        spans[tensor] = [(a, len(program) if a < boundary < b else b) for a, b in found]
    offsets: dict[int, int] = {}
    for tensor in sorted(spans, key=lambda t: (-sizes[t], t)):
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if _meet(spans[tensor], spans[other])
        )
        offset = 0
        for low, high in taken:
            if offset + sizes[tensor] <= low:
                break
            offset = max(offset, high)
        offsets[tensor] = offset
    extent = max((offsets[t] + sizes[t] for t in offsets), default=0)
    return HostPlacement(offsets, extent)


def _meet(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)
