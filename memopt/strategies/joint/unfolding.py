"""From a folded step's decisions to the whole step's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memopt.strategies.joint.folding import Folding
from memopt.strategies.joint.neighbours import Decisions
from memopt.strategies.shared.run_table import BOUNDARY, Flags, Ints, RunTable


@dataclass(frozen=True, eq=False)
class Unfolding:
    """Runs and flags of the whole step, from those of a folded one.

    Before each first run of an operator of a group come the repeated runs that are before that of
    the group's: those of groups up to `reach` away in layers as far from its own, the others, of
    all layers of theirs, only before the first of the group to run.

    Attributes:
        folding: of the whole step.
        folded, whole: the variants of both.
        reach: see above.
    """

    folding: Folding
    folded: RunTable
    whole: RunTable
    reach: int

    @cached_property
    def image(self) -> Ints:
        """Tensor of the whole step → of the folded one."""
        found = np.zeros(len(self.whole.graph.tensors), dtype=np.int64)
        for t, n in self.folding.image.items():
            found[t] = n
        return found

    def decisions(self, at: Decisions) -> Decisions:
        """Decisions of the folded step, as the whole step's."""
        return Decisions(self.runs(at.runs), self.flags(at.stays), self.flags(at.first))

    def flags(self, flags: Flags) -> Flags:
        """What holds of the folded step's tensors, of those they stand for."""
        found: Flags = flags[self.image]
        return found

    def runs(self, runs: Ints) -> Ints:
        """The whole step's runs: the keys of all, ascending, say which."""
        keys, pending = list[Ints](), list[int]()
        highest = -1
        for run in runs.tolist():
            i = BOUNDARY if run == BOUNDARY else self.folded.variants[run][0]
            if i != BOUNDARY and i <= highest:
                pending.append(run)
                continue
            highest = max(highest, i)
            keys += [self._repeated(i, one) for one in pending]
            if i == BOUNDARY:
                keys.append(np.array([self._before(i)[0] + self._many]))
            else:
                keys.append(self._before(i) + self._many + self._variants(self._members[i], run))
            pending = []
        found: Ints = np.unique(np.concatenate(keys)) % self._many - 1
        return found

    @cached_property
    def _many(self) -> int:
        """More than any variant; a key is (position, whether it is a first run, variant + 1)."""
        return len(self.whole.variants) + 1

    def _before(self, i: int) -> Ints:
        """The keys of what is just before the operators that folded operator i stands for."""
        if i == BOUNDARY:
            return np.array([4 * self.whole.graph.first_backward * self._many])
        return (4 * self._members[i] + 2) * self._many

    def _repeated(self, i: int, run: int) -> Ints:
        """The keys of a repeated run before folded operator i."""
        n = self.folded.variants[run][0]
        others, before, folding = self._members[n], self._before(i), self.folding
        own = None if i == BOUNDARY else self._group[i]
        other = self._group[n]
        if own is None or other is None or abs(other - own) > self.reach:
            return self._variants(others, run) + int(before.min())
        core, layers = folding.layers.core, self._layer[self._members[i]]
        there = np.clip(layers + other - own, core.start, core.stop - 1)
        first = int(others[0])
        step = folding.layers.at(first, int(self._layer[first]) + 1) - first
        return before + self._variants(first + (there - self._layer[first]) * step, run)

    def _variants(self, operators: Ints, run: int) -> Ints:
        """The runs of operators as a folded one's, counted from 1."""
        n = self.folded.variants[run][0]
        place = run - self.folded.number[n, None]
        found: Ints = self._first_variant[operators] + place + 1
        return found

    @cached_property
    def _first_variant(self) -> Ints:
        operators = range(len(self.whole.graph.operators))
        return np.array([self.whole.number[i, None] for i in operators], dtype=np.int64)

    @cached_property
    def _group(self) -> list[int | None]:
        """The group of each of the folded step's operators."""
        return [self.folding.group[i] for i in self.folding.kept]

    @cached_property
    def _layer(self) -> Ints:
        layers = [-1 if layer is None else layer for layer in self.folding.layers.layer]
        return np.array(layers, dtype=np.int64)

    @cached_property
    def _members(self) -> list[Ints]:
        """Operator of the folded step → those that it stands for, ascending."""
        number = np.array(self.folding.number, dtype=np.int64)
        return [np.flatnonzero(number == n) for n in range(len(self.folding.kept))]
