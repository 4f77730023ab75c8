"""Equal layers of a step: stretches of operators that repeat, and layers that are proved equal.

Stretches are found by the kinds of operators. Layer l of `RepeatedLayers` has the operators of one
repetition of a forward stretch and of one of a backward stretch. Two layers are equal if their
operators at the same places have the same description: what they read and write, in every
implementation, is at the same place of the same layer, of the layer before or after, or the same
tensor from outside; sizes and the results of the step are the same. Only seconds and workspaces may
differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from memopt.models.graph import Graph, Implementation, Operator
from memopt.models.last_of import LastOf
from memopt.models.periods import Period

LEAST_SAVED = 4
"""The least number of operators that a stretch must save by repeating."""
NUMBER = re.compile(r"_\d+$")
Slot = tuple[int, int]
"""(operator, index among the tensors that its implementations write)."""


@dataclass(frozen=True, eq=False)
class EqualLayers:
    """The stretches of a graph that repeat."""

    graph: Graph

    @classmethod
    def of(cls, graph: Graph) -> EqualLayers:
        """Return the equal layers of a graph: the same object for the same graph."""
        return _FOUND.of((graph,), None, lambda: cls(graph))

    @cached_property
    def stretches(self) -> tuple[Period, ...]:
        """Return stretches that do not overlap, those that repeat most operators found first."""
        return self._found(range(self.graph.first_backward))

    @cached_property
    def backward_stretches(self) -> tuple[Period, ...]:
        """Return the stretches that repeat among the operators after the forward, as `stretches`
        does for the forward."""
        return self._found(range(self.graph.first_backward, len(self.graph.operators)))

    def _found(self, operators: range) -> tuple[Period, ...]:
        kinds: dict[object, int] = {}
        numbers = [kinds.setdefault(self._kind(i), len(kinds)) for i in operators]
        return tuple(_stretches(np.array(numbers, dtype=np.int64), operators.start))

    def _kind(self, i: int) -> object:
        """Return the key by which operators are alike: name, bytes read and written,
        alternatives."""
        graph, operator = self.graph, self.graph.operators[i]
        return (
            NUMBER.sub("", operator.name),
            tuple(graph.tensors[t].size_bytes for t in operator.reads if t not in graph.resident),
            tuple(graph.tensors[t].size_bytes for t in operator.writes),
            operator.workspace_bytes,
            operator.recomputable,
            tuple(choice.name for choice in operator.implementations),
        )

    def parts(self) -> Iterator[tuple[Period, range]]:
        """Yield ranges of layers, at least two each: a whole stretch, its halves, their halves,
        ..."""
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


_FOUND = LastOf[EqualLayers]()


def _stretches(kinds: np.ndarray[tuple[int], np.dtype[np.int64]], begin: int) -> Iterator[Period]:
    """Yield the stretch of a sequence that repeats most operators, and those around it."""
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
            best, saved = Period(int(edges[2 * longest]), period, repeated // period + 1), repeated
    if best is None:
        return
    yield Period(begin + best.start, best.length, best.count)
    yield from _stretches(kinds[: best.start], begin)
    yield from _stretches(kinds[best.end :], begin + best.end)


def written(operator: Operator) -> tuple[int, ...]:
    """Return the tensors that an operator writes by any implementation, its own first."""
    others = (t for choice in operator.implementations for t in choice.writes or ())
    return tuple(dict.fromkeys((*operator.writes, *others)))


def ways(operator: Operator) -> tuple[Operator | Implementation, ...]:
    """Return an operator itself, and its other implementations."""
    return (operator, *operator.implementations)


@dataclass(frozen=True, eq=False)
class RepeatedLayers:
    """The equal layers of a step, forward and backward.

    Attributes:
        graph: the training step.
        forward, backward: the stretches; the backward's repetition m belongs to layer `top` - m.
        top: the layer of the backward's first repetition.
    """

    graph: Graph
    forward: Period
    backward: Period
    top: int

    @classmethod
    def of(cls, graph: Graph) -> RepeatedLayers | None:
        """Find the layers that repeat most operators; None if none repeat in both directions."""
        if graph.movable or any(x.collective for x in graph.operators):
            return None
        equal = EqualLayers.of(graph)
        both = equal.stretches, equal.backward_stretches
        if not all(both):
            return None
        forward, backward = (max(one, key=lambda s: s.length * (s.count - 1)) for one in both)
        offsets = Counter(
            forward.part(graph.producer[t]) + backward.part(i)
            for i in range(backward.start, backward.end)
            for t in graph.operators[i].reads
            if forward.start <= graph.producer.get(t, -1) < forward.end
        )
        if not offsets:
            return None
        return cls(graph, forward, backward, offsets.most_common(1)[0][0])

    @cached_property
    def layer(self) -> tuple[int | None, ...]:
        """Return the layer of each operator, None outside of layers."""
        found: list[int | None] = [None] * len(self.graph.operators)
        for i in range(self.forward.start, self.forward.end):
            found[i] = self.forward.part(i)
        for i in range(self.backward.start, self.backward.end):
            found[i] = self.top - self.backward.part(i)
        return tuple(found)

    @cached_property
    def home(self) -> dict[int, Slot]:
        """Map computed tensors to the first operator that writes them, and their index there."""
        found: dict[int, Slot] = {}
        for i, operator in enumerate(self.graph.operators):
            for slot, t in enumerate(written(operator)):
                found.setdefault(t, (i, slot))
        return found

    @cached_property
    def core(self) -> range:
        """Return the longest run of equal layers of which others read only the first and the last;
        empty if there is none."""
        described = [(n, self._description(n)) for n in range(self.forward.count)]
        runs = [[n for n, _ in same] for key, same in groupby(described, lambda one: one[1]) if key]
        longest = max(runs, key=len, default=[])
        if not longest:
            return range(0)
        low, high = longest[0], longest[-1]
        marked = sorted({low, high, *(n for n in self._read_outside(low, high) if low < n < high)})
        low, high = max(
            pairwise(marked),
            key=lambda pair: pair[1] - pair[0],
            default=(low, low),
        )
        return range(low, high + 1)

    def operators_of(self, layer: int) -> tuple[int, ...]:
        """Return a layer's forward and backward operators; () if it does not have both."""
        m = self.top - layer
        if not (0 <= layer < self.forward.count and 0 <= m < self.backward.count):
            return ()
        return (*self.forward.positions(layer), *self.backward.positions(m))

    def at(self, i: int, layer: int) -> int:
        """Return the operator of `layer` at the place of operator i in its own layer."""
        own = self.layer[i]
        assert own is not None
        forward = i < self.forward.end
        return i + (layer - own) * (self.forward.length if forward else -self.backward.length)

    def _read_outside(self, low: int, high: int) -> Iterator[int]:
        """Yield layers whose tensors are read by operators outside the layers from low to high."""
        for i, operator in enumerate(self.graph.operators):
            own = self.layer[i]
            if own is not None and low <= own <= high:
                continue
            for one in ways(operator):
                homes = (self.home.get(t) for t in one.reads or ())
                layers = (self.layer[home[0]] for home in homes if home is not None)
                yield from (layer for layer in layers if layer is not None)

    def _description(self, layer: int) -> tuple[object, ...]:
        """Return the key that equal layers share; () if the layer cannot be equal to any."""
        graph = self.graph
        found: list[object] = []
        for i in self.operators_of(layer):
            operator = graph.operators[i]
            seen = [[self._relative(layer, t) for t in _tensors(one)] for one in ways(operator)]
            if any(isinstance(x[0], int) and abs(x[0]) > 1 for one in seen for x in one):
                return ()
            if any(self._relative(layer, t)[0] != 0 for t in written(operator)):
                return ()
            lengths = [_lengths(one) for one in ways(operator)]
            facts = [self._facts(t) for t in written(operator)]
            same = operator.phase, operator.recomputable, operator.random
            names = [(c.name, c.exact, c.packed) for c in operator.implementations]
            found.append((same, tuple(names), str(lengths), tuple(map(tuple, seen)), tuple(facts)))
        return tuple(found)

    def _facts(self, t: int) -> tuple[object, ...]:
        graph, tensor = self.graph, self.graph.tensors[t]
        kept = t in graph.outputs, t in graph.gradients, t in graph.allocator_owned
        return tensor.size_bytes, tensor.kind, *kept

    def _relative(self, layer: int, t: int) -> tuple[object, ...]:
        """Name a tensor by its place relative to a layer, so that equal layers name theirs alike:
        (layers from here, in the forward or not, place of its operator, index there); a tensor from
        outside the layers by itself."""
        if t not in self.home:
            return ("outside", -1 if t in self.graph.resident else t)
        i, slot = self.home[t]
        other = self.layer[i]
        if other is None:
            return ("outside", t)
        stretch = self.forward if i < self.forward.end else self.backward
        return (other - layer, stretch is self.forward, stretch.offset(i), slot)


def _tensors(one: Operator | Implementation) -> tuple[int, ...]:
    return (*(one.reads or ()), *(one.writes or ()), *one.in_place)


def _lengths(one: Operator | Implementation) -> tuple[int | None, ...]:
    return tuple(None if x is None else len(x) for x in (one.reads, one.writes, one.in_place))
