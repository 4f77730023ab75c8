"""Small changes of runs: run something again, or not again, or by another implementation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from random import Random
from typing import TypeAlias

import numpy as np

from memopt.strategies.joint.moved import Moved, Mover
from memopt.strategies.shared.run_table import BOUNDARY, Flags, Ints

Change: TypeAlias = Callable[[], "Decisions | None"]
"""Makes other decisions; None where that cannot be."""

LONGEST = 64
"""Operators that one change may run again at most."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a local search changes.

    Attributes:
        runs: see `RunTable`.
        stays: tensors that are not to move.
        first: tensors that move before any others do.
    """

    runs: Ints
    stays: Flags
    first: Flags


@dataclass(eq=False)
class Neighbourhood:
    """The changes of some decisions.

    Attributes:
        mover: of the graph and its budget.
        at: the decisions.
        moved: what became of them; None: only their runs are to change.
        rng: for their order.
    """

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
        """Tensors that a variant reads, but for resident ones."""
        return self.mover.table.reads_of[run]

    def writes(self, run: int) -> tuple[int, ...]:
        """Tensors that a variant writes."""
        return self.mover.table.writes_of[run]

    def changes(self) -> Iterator[Decisions]:
        """All of them, in a random order."""
        made = [*self._fewer(), *self._more(), *self._moves(), *self._variants()]
        self.rng.shuffle(made)
        for change in made:
            found = change()
            if found is not None:
                yield found

    def _with_runs(self, runs: list[int]) -> Decisions:
        return Decisions(np.array(runs, dtype=np.int64), self.at.stays, self.at.first)

    def _fewer(self) -> Iterator[Change]:
        """Runs that are left out: one, or neighbours."""
        begin = None
        for p, again in enumerate([*self.again, False]):
            if again:
                begin = p if begin is None else begin
                yield partial(self.without, p, p + 1)
            elif begin is not None:
                length = p - begin
                if length > 2:
                    middle = begin + length // 2
                    yield partial(self.without, begin, middle)
                    yield partial(self.without, middle, p)
                if length > 1:
                    yield partial(self.without, begin, p)
                begin = None

    def without(self, begin: int, end: int) -> Decisions:
        """No second runs at time points begin..end."""
        return self._with_runs(self.runs[:begin] + self.runs[end:])

    @cached_property
    def gaps(self) -> list[tuple[int, int, int]]:
        """(tensor, after, before) of the tensors that need not be there all the time."""
        v, found = self.mover.arrays, []
        for t, lives in self._lives.items():
            if v.stays[t] or v.size_bytes[t] < self.mover.least_bytes:
                continue
            for touches in lives:
                for after, before in pairwise(touches):
                    if before > after + 3:
                        found.append((t, after, before))
        return found

    def _more(self) -> Iterator[Change]:
        """Tensors that are made again before a reader."""
        operators = self.mover.table.graph.operators
        for t, _, before in self.gaps:
            run = self.made_by.get(t)
            if run is not None and operators[self.mover.table.variants[run][0]].recomputable:
                yield partial(self.made_again, t, before, False)
                yield partial(self.made_again, t, before, True)

    def made_again(self, tensor: int, before: int, deep: bool) -> Decisions | None:
        """A tensor made again just before a reader.

        Args:
            tensor: which.
            before: the reader's time point.
            deep: whether what that reads is made again, too, where it is not there any more.
        """
        chosen = self._makers(tensor, before, deep)
        if not chosen:
            return None
        return self._with_runs(self.runs[:before] + chosen + self.runs[before:])

    def _makers(self, tensor: int, before: int, deep: bool) -> list[int]:
        """The runs that make a tensor again, see `made_again`; none where that cannot be."""
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
                stack += [u for u in self.reads(run) if not self._there(u, before)]
        return sorted(chosen)

    def all_made_again(self, tensors: list[tuple[int, int]], deep: bool) -> Decisions | None:
        """Several tensors, each made again before a reader of its own; see `made_again`.

        Args:
            tensors: (tensor, the reader's time point) of each.
            deep: as there.
        """
        runs, done, end = list[int](), 0, 0
        for tensor, before in sorted(tensors, key=lambda pair: pair[1]):
            again = self._makers(tensor, before, deep)
            if again:
                runs += [*self.runs[end:before], *again]
                done, end = done + 1, before
        return self._with_runs([*runs, *self.runs[end:]]) if done else None

    def without_points(self, points: list[int]) -> Decisions:
        """Nothing runs at some time points."""
        left_out = set(points)
        return self._with_runs([run for p, run in enumerate(self.runs) if p not in left_out])

    def _there(self, tensor: int, point: int) -> bool:
        """Whether a tensor is needed before a time point and from it on."""
        lives = self._lives.get(tensor)
        if lives is None:
            return True  # a tangent
        return any(touches[0] < point <= touches[-1] for touches in lives)

    def _moves(self) -> Iterator[Change]:
        """Tensors that move first, or not at all."""
        events = None if self.moved is None else self.moved.events
        if events is None:
            return
        away = set(events[events[:, 1] == 1, 2].tolist())
        for t in sorted({t for t, _, _ in self.gaps}):
            if t in away or self.at.stays[t]:
                yield partial(self.staying, t)
            if t not in away or self.at.first[t]:
                yield partial(self.moving, t)

    def staying(self, tensor: int) -> Decisions:
        """The tensor may not move; or may again."""
        stays, first = self.at.stays.copy(), self.at.first.copy()
        stays[tensor], first[tensor] = not stays[tensor], False
        return Decisions(self.at.runs, stays, first)

    def moving(self, tensor: int) -> Decisions:
        """The tensor moves before others do; or in turn again."""
        stays, first = self.at.stays.copy(), self.at.first.copy()
        stays[tensor], first[tensor] = False, not first[tensor]
        return Decisions(self.at.runs, stays, first)

    def _variants(self) -> Iterator[Change]:
        """Other implementations of a run."""
        for p, run in enumerate(self.runs):
            if run >= 0:
                for other in self.mover.table.others[run]:
                    yield partial(self.by_another, p, other)

    def by_another(self, point: int, other: int) -> Decisions:
        """A run by another implementation."""
        return self._with_runs([*self.runs[:point], other, *self.runs[point + 1 :]])
