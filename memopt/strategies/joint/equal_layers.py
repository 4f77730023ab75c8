"""Equal layers of a forward: stretches of operators that repeat, found by what operators are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memopt.models.graph import Graph

LEAST_SAVED = 4
"""A stretch repeats at least so many operators."""
NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Stretch:
    """Layers of `period` operators each, `count` of them, from forward operator `begin` on."""

    begin: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The operator after it."""
        return self.begin + self.period * self.count

    def layer_of(self, i: int) -> int:
        """The repetition that an operator belongs to."""
        return (i - self.begin) // self.period


@dataclass(frozen=True, eq=False)
class EqualLayers:
    """The equal layers of a graph.

    Attributes:
        graph: the training step.
    """

    graph: Graph

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Stretches that do not overlap, those that repeat most found first."""
        return self._found(range(self.graph.first_backward))

    @cached_property
    def backward_stretches(self) -> tuple[Stretch, ...]:
        """The same of what runs after the forward."""
        return self._found(range(self.graph.first_backward, len(self.graph.operators)))

    def _found(self, operators: range) -> tuple[Stretch, ...]:
        kinds: dict[object, int] = {}
        numbers = [kinds.setdefault(self._kind(i), len(kinds)) for i in operators]
        return tuple(_stretches(np.array(numbers, dtype=np.int64), operators.start))

    def _kind(self, i: int) -> object:
        """What operators must share to be alike: name, bytes read and written, alternatives."""
        graph, operator = self.graph, self.graph.operators[i]
        return (
            NUMBER.sub("", operator.name),
            tuple(graph.tensors[t].size_bytes for t in operator.reads if t not in graph.resident),
            tuple(graph.tensors[t].size_bytes for t in operator.writes),
            operator.workspace_bytes,
            operator.recomputable,
            tuple(choice.name for choice in operator.implementations),
        )

    @property
    def distinct(self) -> int:
        """Forward operators, those of equal layers counted once."""
        repeated = sum((stretch.count - 1) * stretch.period for stretch in self.stretches)
        return self.graph.first_backward - repeated

    def parts(self) -> Iterator[tuple[Stretch, range]]:
        """Ranges of layers, at least two each: all of a stretch, its halves, their halves, ..."""
        for stretch in self.stretches:
            ranges = [range(stretch.count)]
            while ranges:
                yield from ((stretch, part) for part in ranges)
                ranges = [
                    half
                    for part in ranges
                    if len(part) >= 4
                    for half in (part[: len(part) // 2], part[len(part) // 2 :])
                ]


def _stretches(kinds: np.ndarray[tuple[int], np.dtype[np.int64]], begin: int) -> Iterator[Stretch]:
    """The stretch of a sequence that repeats most operators, and those before and after it."""
    best, saved = None, LEAST_SAVED - 1
    for period in range(1, kinds.size // 2 + 1):
        same = np.concatenate(([0], kinds[:-period] == kinds[period:], [0]))
        edges = np.flatnonzero(np.diff(same))
        if not edges.size:
            continue
        lengths = edges[1::2] - edges[::2]
        longest = int(lengths.argmax())
        repeated = int(lengths[longest]) // period * period
        if repeated > saved:
            best, saved = Stretch(int(edges[2 * longest]), period, repeated // period + 1), repeated
    if best is None:
        return
    yield Stretch(begin + best.begin, best.period, best.count)
    yield from _stretches(kinds[: best.begin], begin)
    yield from _stretches(kinds[best.end :], begin + best.end)
