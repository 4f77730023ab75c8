"""The share of a program that its placement covers, and the kernels it leaves to the allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.programs.replay import replay

ALIGNMENT_BYTES = 64
"""Unit of addresses that kernels write to, as torch's own allocator aligns them on the CPU. (On
CUDA sizes are multiples of 512 bytes, and so are addresses.)"""


def first_fit(taken: Iterable[tuple[int, int]], size_bytes: int) -> int:
    """Return the lowest offset at which so many bytes overlap none of the intervals [low, high)."""
    offset = 0
    for low, high in sorted(taken):
        if offset + size_bytes <= low:
            break
        offset = max(offset, high)
    return offset


@dataclass(frozen=True, slots=True)
class OutsideKernel:
    """A kernel whose results are not in the arena.

    Attributes:
        target: "aten.convolution.default".
        calls: how often it runs.
        bytes_written: of all its calls together.
    """

    target: str
    calls: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """A placed program's arena and the memory outside it.

    Attributes:
        arena_bytes: the one allocation.
        extra_bytes: the most memory outside it at any instruction: resident tensors, results,
            tangents, workspace, and the results of the kernels in `outside`.
        covered_bytes: written by kernels at planned addresses in one step.
        outside_bytes: written elsewhere in one step, results of the step not counted.
        results_bytes: outputs and gradients, which leave the step and so lie outside.
        outside: the kernels that write elsewhere, most bytes first.
    """

    arena_bytes: int
    extra_bytes: int
    covered_bytes: int
    outside_bytes: int
    results_bytes: int
    outside: tuple[OutsideKernel, ...]

    @property
    def coverage(self) -> float:
        """Share of the bytes written by kernels (results apart) that go to planned addresses."""
        total = self.covered_bytes + self.outside_bytes
        return self.covered_bytes / total if total else 1.0


def arena_use(graph: Graph, program: Program) -> ArenaUse | None:
    """Count the bytes that a program's placement covers; None if it has none."""
    if program.offsets is None:
        return None
    timeline = replay(graph, program)
    assert timeline.arena_bytes is not None
    assert timeline.placed_peak_bytes is not None
    placed = {(position, tensor) for position, tensor, _ in program.offsets}
    covered = results = 0
    written: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    for position, instruction in program.computes:
        operator = graph.operators[instruction.op]
        outside = 0
        for tensor in variant(operator, instruction.implementation).writes:
            size_bytes = graph.tensors[tensor].size_bytes
            if (position, tensor) in placed:
                covered += size_bytes
            elif tensor in graph.kept:
                results += size_bytes
            else:
                outside += size_bytes
        if outside:
            written[operator.target] += outside
            calls[operator.target] += 1
    kernels = [OutsideKernel(name, calls[name], size) for name, size in written.items()]
    kernels.sort(key=lambda kernel: (-kernel.bytes_written, kernel.target))
    return ArenaUse(
        arena_bytes=timeline.arena_bytes,
        extra_bytes=timeline.placed_peak_bytes - timeline.arena_bytes,
        covered_bytes=covered,
        outside_bytes=sum(written.values()),
        results_bytes=results,
        outside=tuple(kernels),
    )
