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
    """Place a program's host copies by first fit, in the best of four orders: of sizes, of bytes
    times lifetime, of ends and of beginnings. All but the last begin with the largest.

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
            if _meet(spans[tensor], spans[other])
        ]
        offsets[tensor] = first_fit(taken, sizes[tensor])
    return HostPlacement(offsets, max((offsets[t] + sizes[t] for t in offsets), default=0))


def _meet(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)
