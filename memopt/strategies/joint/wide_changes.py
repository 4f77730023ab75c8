"""Changes of many equal layers at once: the same place of each, in all layers or a part of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from memopt.strategies.joint.equal_layers import Stretch
from memopt.strategies.joint.neighbours import Change, Decisions, Neighbourhood
from memopt.strategies.shared.run_table import Flags


@dataclass(frozen=True, eq=False)
class WideChanges:
    """The changes of some decisions that are alike in equal layers.

    Where a model's layers are equal there are far fewer than changes one by one: some for each
    operator of a layer, times the parts that layers are divided into.

    Attributes:
        near: the changes one by one.
    """

    near: Neighbourhood

    def changes(self) -> Iterator[Decisions]:
        """All of them, in a random order."""
        made = [change for part in self._parts() for change in part]
        self.near.rng.shuffle(made)
        for change in made:
            found = change()
            if found is not None:
                yield found

    def _parts(self) -> Iterator[Iterator[Change]]:
        for stretch, layers in self.near.mover.layers.parts():
            yield self._layers(stretch, layers)
            for place in range(stretch.period):
                begin = stretch.begin + place
                yield self._place([begin + layer * stretch.period for layer in layers])

    @cached_property
    def _longest_gap(self) -> dict[int, int]:
        """Tensor → the reader before which it is not needed for longest."""
        found: dict[int, tuple[int, int]] = {}
        for t, after, before in self.near.gaps:
            found[t] = max(found.get(t, (0, 0)), (before - after, before))
        return {t: before for t, (_, before) in found.items()}

    @cached_property
    def _points(self) -> dict[int, list[int]]:
        """Operator → its time points."""
        found: dict[int, list[int]] = {}
        for p, operator in enumerate(self.near.operators):
            found.setdefault(operator, []).append(p)
        return found

    def _again(self, operators: list[int]) -> list[int]:
        """Time points at which any of some operators runs again."""
        return [p for i in operators for p in self._points.get(i, ())[1:]]

    def _layers(self, stretch: Stretch, layers: range) -> Iterator[Change]:
        first, last = layers[0], layers[-1] + 1
        begin, end = stretch.begin + first * stretch.period, stretch.begin + last * stretch.period
        again = self._again(list(range(begin, end)))
        if again:
            yield partial(self.near.without_points, again)

    def _place(self, operators: list[int]) -> Iterator[Change]:
        again = self._again(operators)
        if again:
            yield partial(self.near.without_points, again)
        graph = self.near.mover.table.graph
        for place in range(len(graph.operators[operators[0]].writes)):
            tensors = [graph.operators[i].writes[place] for i in operators]
            tensors = [t for t in tensors if t in self._longest_gap]
            if not tensors:
                continue
            if graph.operators[operators[0]].recomputable:
                before = [(t, self._longest_gap[t]) for t in tensors]
                for deep in (False, True):
                    yield partial(self.near.all_made_again, before, deep)
            yield partial(self._toggled, self.near.at.stays, self.near.at.first, tensors, False)
            yield partial(self._toggled, self.near.at.first, self.near.at.stays, tensors, True)
        yield from self._variants(operators)

    def _toggled(self, which: Flags, other: Flags, tensors: list[int], first: bool) -> Decisions:
        """Tensors that move first, or not at all; where all of them do already, in turn again."""
        which, other = which.copy(), other.copy()
        which[tensors], other[tensors] = not which[tensors].all(), False
        return Decisions(self.near.at.runs, *((other, which) if first else (which, other)))

    def _variants(self, operators: list[int]) -> Iterator[Change]:
        """Runs of some operators by another implementation."""
        points = [p for i in operators for p in self._points.get(i, ())]
        if not points:
            return
        others = self.near.mover.table.others
        for place in range(len(others[self.near.runs[points[0]]])):
            yield partial(self._by_another, points, place)

    def _by_another(self, points: list[int], place: int) -> Decisions:
        runs, others = np.array(self.near.runs), self.near.mover.table.others
        for p in points:
            runs[p] = others[runs[p]][place]
        return Decisions(runs, self.near.at.stays, self.near.at.first)
