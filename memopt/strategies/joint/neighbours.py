"""Changes of runs and moves: of one run or tensor, or of the same place of many equal layers.

Where a model's layers are equal there are far fewer changes of the second kind: some for each
operator of a layer, times the parts that layers are divided into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from random import Random
from typing import TypeAlias

import numpy as np

from memopt.strategies.joint.moved import Moved, Mover
from memopt.strategies.shared.run_table import BOUNDARY, Flags, Ints

Change: TypeAlias = Callable[[], "Decisions | None"]
"""Makes other decisions; None if that is impossible."""

LONGEST = 64
"""The most operators that one change may run again."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """The decisions that a local search changes.

    Attributes:
        runs: see `RunTable`.
        stays: tensors that must not move.
        first: tensors that move before any others do.
    """

    runs: Ints
    stays: Flags
    first: Flags


@dataclass(eq=False)
class Neighbourhood:
    """The changes of some decisions."""

    mover: Mover
    at: Decisions
    moved: Moved | None
    rng: Random
    _lives: dict[int, list[list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.runs: list[int] = self.at.runs.tolist()
        table, self.again = self.mover.table, [False] * len(self.runs)
        self.operators = [BOUNDARY if r < 0 else table.variants[r][0] for r in self.runs]
        self.made_by: dict[int, int] = {}
        seen: set[int] = set()
        lives: dict[int, list[list[int]]] = defaultdict(list)
        for p, run in enumerate(self.runs):
            if run < 0:
                continue
            self.again[p] = self.operators[p] in seen
            seen.add(self.operators[p])
            for t in self.reads(run):
                if lives[t]:
                    lives[t][-1].append(p)
            for t in self.writes(run):
                lives[t].append([p])
                self.made_by.setdefault(t, run)
        self._lives = lives

    def reads(self, run: int) -> tuple[int, ...]:
        """Return the tensors that a variant reads, without resident ones."""
        return self.mover.table.reads_of[run]

    def writes(self, run: int) -> tuple[int, ...]:
        """Return the tensors that a variant writes."""
        return self.mover.table.writes_of[run]

    def changes(self, wide: bool = False) -> Iterator[Decisions]:
        """Yield all changes in a random order: one by one, or (`wide`) of equal layers at once."""
        single = (self._omissions, self._recomputations, self._moves, self._variants)
        made = (
            list(self._changes_of_layers())
            if wide
            else [change for kind in single for change in kind()]
        )
        self.rng.shuffle(made)
        for change in made:
            found = change()
            if found is not None:
                yield found

    def _with_runs(self, runs: Ints) -> Decisions:
        return Decisions(runs, self.at.stays, self.at.first)

    def _omissions(self) -> Iterator[Change]:
        """Yield changes that leave out one run, or neighbouring runs."""
        begin = None
        for p, again in enumerate([*self.again, False]):
            if again:
                begin = p if begin is None else begin
                yield partial(self.without, range(p, p + 1))
            elif begin is not None:
                length = p - begin
                if length > 2:
                    middle = begin + length // 2
                    yield partial(self.without, range(begin, middle))
                    yield partial(self.without, range(middle, p))
                if length > 1:
                    yield partial(self.without, range(begin, p))
                begin = None

    def without(self, points: Sequence[int]) -> Decisions:
        """Leave out the runs at some time points."""
        return self._with_runs(np.delete(self.at.runs, points))

    @cached_property
    def gaps(self) -> list[tuple[int, int, int]]:
        """Return (tensor, after, before) of each stretch in which a tensor is not needed."""
        v, found = self.mover.arrays, []
        for t, lives in self._lives.items():
            if v.stays[t] or v.size_bytes[t] < self.mover.least_bytes:
                continue
            for touches in lives:
                for after, before in pairwise(touches):
                    if before > after + 3:
                        found.append((t, after, before))
        return found

    def _recomputations(self) -> Iterator[Change]:
        """Yield changes that make tensors again before a reader."""
        operators = self.mover.table.graph.operators
        for t, _, before in self.gaps:
            run = self.made_by.get(t)
            if run is not None and operators[self.mover.table.variants[run][0]].recomputable:
                for deep in (False, True):
                    yield partial(self.made_again, [(t, before)], deep)

    def made_again(self, tensors: list[tuple[int, int]], deep: bool) -> Decisions | None:
        """Make tensors again, each just before a reader; None if none can be.

        Args:
            tensors: (tensor, the reader's time point) of each.
            deep: whether operands that are no longer in memory are made again, too.
        """
        again = [
            (before, run)
            for tensor, before in sorted(tensors, key=lambda pair: pair[1])
            for run in self._makers(tensor, before, deep)
        ]
        points, runs = [before for before, _ in again], [run for _, run in again]
        return self._with_runs(np.insert(self.at.runs, points, runs)) if again else None

    def _makers(self, tensor: int, before: int, deep: bool) -> list[int]:
        """Return the runs that make a tensor again, see `made_again`; none if impossible."""
        graph, chosen, stack = self.mover.table.graph, set[int](), [tensor]
        while stack:
            t = stack.pop()
            run = self.made_by.get(t)
            if run is None or run in chosen:
                continue
            if not graph.operators[self.mover.table.variants[run][0]].recomputable:
                if t == tensor:
                    return []
                continue
            chosen.add(run)
            if len(chosen) > LONGEST:
                return []
            if deep:
                stack += [u for u in self.reads(run) if not self._is_needed_around(u, before)]
        return sorted(chosen)

    def _is_needed_around(self, tensor: int, point: int) -> bool:
        """Tell whether a tensor is needed both before a time point and from it on."""
        lives = self._lives.get(tensor)
        if lives is None:
            return True  # a tangent
        return any(touches[0] < point <= touches[-1] for touches in lives)

    def _moves(self) -> Iterator[Change]:
        """Yield changes that make one tensor move before all others, or forbid it to move."""
        events = None if self.moved is None else self.moved.events
        if events is None:
            return
        away = set(events[events[:, 1] == 1, 2].tolist())
        for t in sorted({t for t, _, _ in self.gaps}):
            if t in away or self.at.stays[t]:
                yield partial(self.toggled, [t], False)
            if t not in away or self.at.first[t]:
                yield partial(self.toggled, [t], True)

    def toggled(self, tensors: list[int], first: bool) -> Decisions:
        """Make tensors move before all others (`first`), or forbid them to move; if all of them are
        so already, undo that."""
        stays, moves_first = self.at.stays.copy(), self.at.first.copy()
        which, other = (moves_first, stays) if first else (stays, moves_first)
        which[tensors], other[tensors] = not which[tensors].all(), False
        return Decisions(self.at.runs, stays, moves_first)

    def _variants(self) -> Iterator[Change]:
        """Yield changes of the implementation of one run."""
        for p in range(len(self.runs)):
            yield from self._other_variants([p])

    def _other_variants(self, points: list[int]) -> Iterator[Change]:
        """Yield changes of the implementation of runs of the same kind."""
        run = self.runs[points[0]]
        for place in range(len(self.mover.table.others[run]) if run >= 0 else 0):
            yield partial(self.by_another, points, place)

    def by_another(self, points: list[int], place: int) -> Decisions:
        """Run time points by another implementation: the one at `place` among the others."""
        runs, others = self.at.runs.copy(), self.mover.table.others
        for p in points:
            runs[p] = others[runs[p]][place]
        return self._with_runs(runs)

    def _changes_of_layers(self) -> Iterator[Change]:
        """Yield changes of many equal layers at once: of all layers of a stretch, of its halves, of
        their halves..."""
        for stretch, layers in self.mover.layers.parts():
            begin, period = stretch.at(layers[0], 0), stretch.length
            again = self._repeated_points(range(begin, begin + len(layers) * period))
            if again:
                yield partial(self.without, again)
            for place in range(begin, begin + period):
                yield from self._changes_of_place(
                    range(place, place + len(layers) * period, period)
                )

    @cached_property
    def _longest_gap(self) -> dict[int, int]:
        """Map each tensor to the reader before its longest gap."""
        found: dict[int, tuple[int, int]] = {}
        for t, after, before in self.gaps:
            found[t] = max(found.get(t, (0, 0)), (before - after, before))
        return {t: before for t, (_, before) in found.items()}

    @cached_property
    def _points(self) -> dict[int, list[int]]:
        """Map operators to their time points."""
        found: dict[int, list[int]] = {}
        for p, operator in enumerate(self.operators):
            found.setdefault(operator, []).append(p)
        return found

    def _repeated_points(self, operators: range) -> list[int]:
        """Return time points at which any of some operators runs again."""
        return [p for i in operators for p in self._points.get(i, ())[1:]]

    def _changes_of_place(self, operators: range) -> Iterator[Change]:
        """Yield the changes made to all of these operators at once, which have the same place in
        equal layers."""
        again = self._repeated_points(operators)
        if again:
            yield partial(self.without, again)
        graph = self.mover.table.graph
        for place in range(len(graph.operators[operators[0]].writes)):
            tensors = [graph.operators[i].writes[place] for i in operators]
            tensors = [t for t in tensors if t in self._longest_gap]
            if not tensors:
                continue
            if graph.operators[operators[0]].recomputable:
                before = [(t, self._longest_gap[t]) for t in tensors]
                for deep in (False, True):
                    yield partial(self.made_again, before, deep)
            for first in (False, True):
                yield partial(self.toggled, tensors, first)
        points = [p for i in operators for p in self._points.get(i, ())]
        if points:
            yield from self._other_variants(points)
