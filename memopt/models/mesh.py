"""A mesh of ranks by name, for plans on a cluster that is not at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARING = frozenset({"tensor", "tp", "context", "cp", "sequence", "sp", "pipeline", "pp", "pipe"})
"""Names of dimensions along which ranks work on the same batch."""
MOST_RANKS = 2**17
"""torch lists the ranks of a mesh; of so many in ten seconds."""


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Ranks in named dimensions, `Mesh(data=64, tensor=8)`. The ranks of the last dimension are
    neighbours, as in torch's DeviceMesh, so it belongs on the links within a node.

    Attributes:
        sizes: (name, ranks) of each dimension, the outermost first.
    """

    sizes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        if not sizes:
            raise ValueError("Mesh: name its dimensions, Mesh(data=64) or Mesh(data=64, tensor=8)")
        for name, ranks in sizes.items():
            if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
                raise ValueError(f"Mesh: {name} must be a number of ranks, at least 1: {ranks!r}")
        object.__setattr__(self, "sizes", tuple(sizes.items()))
        if self.ranks > MOST_RANKS:
            raise ValueError(f"Mesh: {self.ranks:,} ranks are more than {MOST_RANKS:,}")

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions' names."""
        return tuple(name for name, _ in self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions' numbers of ranks."""
        return tuple(ranks for _, ranks in self.sizes)

    @property
    def batches(self) -> int:
        """Number of ranks with a batch of their own: all but those along dimensions that share one,
        by their names (`SHARING`)."""
        return math.prod(ranks for name, ranks in self.sizes if name not in SHARING)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return " × ".join(f"{ranks} {name}" for name, ranks in self.sizes)

    def size(self, name: str) -> int:
        """Return the ranks of a dimension; 1: there is none of that name."""
        return dict(self.sizes).get(name, 1)


def in_flight(stages: int, micro_batches: int, rank: int = 0, parts: int = 1) -> int:
    """Return how many micro-batches' activations a pipeline's rank holds, times its parts: under
    1F1B, with several parts interleaved (arXiv:2104.04473, section 2.2)."""
    after = stages - rank
    warm = after if parts == 1 else (parts - 1) * stages + 2 * (after - 1) + 1
    return min(warm, parts * micro_batches)


def pipeline_turns(stages: int, micro_batches: int, parts: int = 1) -> float:
    """Return how many micro-batches' time a pipeline's step takes: its own, and those that fill
    it."""
    return micro_batches + (stages - 1) / parts
