"""Places host copies in the pinned pool: one offset per tensor, live copies never overlapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.placed import first_fit

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
    """Place a program's host copies by first fit in order of decreasing size.

    Offsets and sizes are multiples of 512 bytes, so that copies of any dtype are aligned.
    """
    # A second backward (retain_graph) reads what crossed the boundary: keep it from being reused.
    boundary = program.boundary or 0
    spans: dict[int, list[tuple[int, int]]] = {}
    for begin, tensor, end in lifetimes(graph, program).host:
        crosses = begin < boundary < end
        spans.setdefault(tensor, []).append((begin, len(program) if crosses else end))
    sizes = {t: -(-graph.tensors[t].size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in spans}
    offsets: dict[int, int] = {}
    for tensor in sorted(spans, key=lambda t: (-sizes[t], t)):
        taken = [
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if _meet(spans[tensor], spans[other])
        ]
        offsets[tensor] = first_fit(taken, sizes[tensor])
    extent = max((offsets[t] + sizes[t] for t in offsets), default=0)
    return HostPlacement(offsets, extent)


def _meet(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)
