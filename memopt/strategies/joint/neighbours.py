"""Changes of runs and moves: of one run or tensor, or of the same place of many equal layers.

Where a model's layers are equal there are far fewer changes of the second kind: some for each
operator of a layer, times the parts that layers are divided into. A search takes most changes
before it has seen many of the others, so that each is made when its turn comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np

from memopt.strategies.joint.layer_changes import LayerChange, LayerChangeKind
from memopt.strategies.joint.moved import Moved, Mover
from memopt.strategies.shared.run_table import BOUNDARY, Flags, Ints

LONGEST = 64
"""The most operators that one change may run again."""
BETWEEN = 3
"""The most time points of a gap that is too short to be used."""


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


def drawn(count: int, rng: Random) -> Iterator[int]:
    """Yield the numbers below `count` in a random order, each drawn when it is asked for."""
    moved: dict[int, int] = {}
    for n in range(count):
        k = rng.randrange(n, count)
        yield moved.get(k, k)
        moved[k] = moved.pop(n, n)


@dataclass(eq=False)
class Neighbourhood:
    """The changes of some decisions."""

    mover: Mover
    at: Decisions
    moved: Moved | None
    rng: Random

    def __post_init__(self) -> None:
        from memopt.strategies.joint.lifetime_kernels import gaps_of, touches_of

        v = self.mover.arrays
        self._touches_at, self._touches, self._computed, self.made_by = touches_of(v, self.at.runs)
        touches = self._touches_at, self._touches, self._computed
        self.gaps = gaps_of(v, *touches, self.mover.least_bytes, BETWEEN)
        """Rows (tensor, after, before): a stretch in which the tensor is not needed."""

    @cached_property
    def operators(self) -> Ints:
        """Return the operator of each time point."""
        runs = self.at.runs
        return np.where(runs < 0, BOUNDARY, self.mover.arrays.operator[runs])

    @cached_property
    def again(self) -> Flags:
        """Tell of each time point whether its operator has run before."""
        found = self.operators >= 0
        found[np.unique(self.operators, return_index=True)[1]] = False
        return found

    def changes(self, wide: bool = False) -> Iterator[Decisions]:
        """Yield all changes in a random order: one by one, or (`wide`) of equal layers at once."""
        if wide:
            together = self.mover.layer_changes
            for number in drawn(len(together), self.rng):
                found = self._of_layers(together[number])
                if found is not None:
                    yield found
            return
        kinds = (
            (self.without, self._omissions),
            (self._recomputed, self._recomputations),
            (self._moved, self._moves),
            (self._by_another, self._variants),
        )
        ends = np.cumsum([len(rows) for _, rows in kinds]).tolist()
        for number in drawn(ends[-1], self.rng):
            kind = sum(end <= number for end in ends)
            change, rows = kinds[kind]
            found = change(*rows[number - ends[kind]].tolist())
            if found is not None:
                yield found

    def _with_runs(self, runs: Ints) -> Decisions:
        return Decisions(runs, self.at.stays, self.at.first)

    @cached_property
    def _omissions(self) -> Ints:
        """Return rows (begin, end) of runs that may be left out: each, neighbours together, and
        either half of them."""
        edges = np.diff(np.concatenate(([False], self.again, [False])).astype(np.int8))
        begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        middle, length = begin + (end - begin) // 2, end - begin
        one = np.flatnonzero(self.again)
        rows = [
            np.stack((one, one + 1), axis=1),
            np.stack((begin, middle), axis=1)[length > 2],
            np.stack((middle, end), axis=1)[length > 2],
            np.stack((begin, end), axis=1)[length > 1],
        ]
        return np.concatenate(rows)

    def without(self, begin: int, end: int) -> Decisions:
        """Leave out the runs from one time point until before another."""
        runs = self.at.runs
        return self._with_runs(np.concatenate((runs[:begin], runs[end:])))

    @cached_property
    def _recomputations(self) -> Ints:
        """Return rows (tensor, reader's time point, deep): tensors to compute again before it."""
        maker = self.made_by[self.gaps[:, 0]]
        rows = self.gaps[self.mover.table.recomputable[maker] & (maker >= 0)][:, [0, 2, 2]]
        rows = np.concatenate((rows, rows))
        rows[: len(rows) // 2, 2], rows[len(rows) // 2 :, 2] = 0, 1
        return rows

    def _recomputed(self, tensor: int, before: int, deep: int) -> Decisions | None:
        return self.made_again([(tensor, before)], bool(deep))

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
        table, chosen, stack = self.mover.table, set[int](), [tensor]
        while stack:
            t = stack.pop()
            run = int(self.made_by[t])
            if run < 0 or run in chosen:
                continue
            if not table.recomputable[run]:
                if t == tensor:
                    return []
                continue
            chosen.add(run)
            if len(chosen) > LONGEST:
                return []
            if deep:
                reads = table.reads_of[run]
                stack += [u for u in reads if not self._is_needed_around(u, before)]
        return sorted(chosen)

    def _is_needed_around(self, tensor: int, point: int) -> bool:
        """Tell whether a tensor is needed both before a time point and from it on."""
        begin, end = int(self._touches_at[tensor]), int(self._touches_at[tensor + 1])
        if begin == end:
            return True  # a tangent
        after = bisect_left(self._touches, point, begin, end)
        return begin < after < end and not self._computed[after]

    @cached_property
    def _moves(self) -> Ints:
        """Return rows (tensor, whether it is to move before all others, or else to stay)."""
        events = None if self.moved is None else self.moved.events
        if events is None or not self.mover.host_bytes:
            return np.empty((0, 2), dtype=np.int64)
        tensors = np.unique(self.gaps[:, 0])
        away = np.isin(tensors, events[events[:, 1] == 1, 2])
        stay = tensors[away | self.at.stays[tensors]]
        move = tensors[~away | self.at.first[tensors]]
        which = np.repeat((0, 1), (len(stay), len(move)))
        return np.stack((np.concatenate((stay, move)), which), axis=1)

    def _moved(self, tensor: int, first: int) -> Decisions:
        return self.toggled([tensor], bool(first))

    def toggled(self, tensors: Sequence[int], first: bool) -> Decisions:
        """Make tensors move before all others (`first`), or forbid them to move; if all of them are
        so already, undo that."""
        stays, moves_first = self.at.stays.copy(), self.at.first.copy()
        which, other = (moves_first, stays) if first else (stays, moves_first)
        which[tensors], other[tensors] = not which[tensors].all(), False
        return Decisions(self.at.runs, stays, moves_first)

    @cached_property
    def _variants(self) -> Ints:
        """Return rows (time point, place of another implementation of its run)."""
        runs = self.at.runs
        counts = np.where(runs < 0, 0, self.mover.table.other_counts[runs])
        points = np.repeat(np.arange(len(runs)), counts)
        places = np.arange(len(points)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack((points, places), axis=1)

    def _by_another(self, point: int, place: int) -> Decisions:
        return self.by_another([point], place)

    def by_another(self, points: Sequence[int], place: int) -> Decisions:
        """Run time points by another implementation: the one at `place` among the others."""
        runs, others = self.at.runs.copy(), self.mover.table.others
        for p in points:
            runs[p] = others[runs[p]][place]
        return self._with_runs(runs)

    def _of_layers(self, change: LayerChange) -> Decisions | None:
        """Make a change of equal layers; None where there is nothing to change."""
        kind, operators, place, option = change
        if kind is LayerChangeKind.TOGGLE and not self.mover.host_bytes:
            return None
        if kind is LayerChangeKind.WITHOUT:
            again = self._repeated_points(operators)
            return self._with_runs(np.delete(self.at.runs, again)) if len(again) else None
        if kind is LayerChangeKind.VARIANT:
            points = [p for i in operators for p in self._points_of(i)]
            return self.by_another(points, place) if points else None
        longest, graph = self._longest_gap, self.mover.table.graph
        tensors = [graph.operators[i].writes[place] for i in operators]
        tensors = [t for t in tensors if t in longest]
        if not tensors:
            return None
        if kind is LayerChangeKind.TOGGLE:
            return self.toggled(tensors, option)
        return self.made_again([(t, longest[t]) for t in tensors], option)

    @cached_property
    def _longest_gap(self) -> dict[int, int]:
        """Map each tensor to the reader before its longest gap."""
        tensors, after, before = self.gaps.T
        order = np.lexsort((before, before - after))
        return dict(zip(tensors[order].tolist(), before[order].tolist(), strict=True))

    @cached_property
    def _by_operator(self) -> tuple[Ints, Ints]:
        """Return (time points in the order of their operators, where each operator's begin)."""
        order = np.argsort(self.operators, kind="stable")
        numbers = np.arange(len(self.mover.table.graph.operators) + 1)
        return order, np.searchsorted(self.operators[order], numbers)

    def _points_of(self, operator: int) -> list[int]:
        """Return the time points of an operator."""
        order, begin = self._by_operator
        found: list[int] = order[begin[operator] : begin[operator + 1]].tolist()
        return found

    def _repeated_points(self, operators: range) -> Ints:
        """Return time points at which any of some operators runs again."""
        points = self._again_points
        past = self.operators[points] - operators.start
        within = (past >= 0) & (past < operators.stop - operators.start)
        found: Ints = points[within & (past % operators.step == 0)]
        return found

    @cached_property
    def _again_points(self) -> Ints:
        return np.flatnonzero(self.again)
