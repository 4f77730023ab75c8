"""A step with fewer of its equal layers, planned instead of it; its decisions are unfolded again.

Equal layers are divided into groups of neighbours. The folded step has one layer of each group, and
everything outside of the layers. Where a layer reads the layer before or after it, the folded one
reads that of the group before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from memopt.models.graph import Graph, Implementation, Operator
from memopt.strategies.joint.equal_layers import RepeatedLayers, ways, written
from memopt.strategies.joint.neighbours import Decisions
from memopt.strategies.shared.run_table import BOUNDARY, Flags, Ints, RunTable

One = TypeVar("One", Operator, Implementation)


def even_groups(count: int, groups: int) -> tuple[int, ...]:
    """Divide layers into so many groups of neighbours, as even as possible; the first and the last
    group have one layer. Return the groups' sizes."""
    inner = max(1, groups - 2)
    cuts = [(count - 2) * k // inner for k in range(inner + 1)]
    return (1, *(b - a for a, b in pairwise(cuts)), 1)


@dataclass(frozen=True, eq=False)
class Folding:
    """A step, and the folded step with one layer of each group.

    Attributes:
        layers: the equal layers of the step.
        groups: how many layers each group has; they add up to all of `layers.core`.
    """

    layers: RepeatedLayers
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.groups) != len(self.layers.core) or min(self.groups) < 1:
            raise ValueError(f"groups of {sum(self.groups)} layers, not {len(self.layers.core)}")
        if self.groups[0] > 1 or self.groups[-1] > 1:
            raise ValueError("what is outside reads of the first and the last layer: groups of one")

    @cached_property
    def first(self) -> tuple[int, ...]:
        """Return the first layer of each group, which stands for it."""
        begin = self.layers.core.start
        return tuple(begin + sum(self.groups[:g]) for g in range(len(self.groups)))

    @cached_property
    def group(self) -> tuple[int | None, ...]:
        """Return the group of each of the step's operators; None outside of all."""
        numbers = [g for g, size in enumerate(self.groups) for _ in range(size)]
        core = self.layers.core
        return tuple(
            numbers[own - core.start] if own is not None and own in core else None
            for own in self.layers.layer
        )

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Return the operators of the step that the folded one has."""
        firsts = set(self.first)
        return tuple(
            i for i, g in enumerate(self.group) if g is None or self.layers.layer[i] in firsts
        )

    @cached_property
    def number(self) -> tuple[int, ...]:
        """Map each operator of the step to the folded operator that stands for it."""
        places = {i: n for n, i in enumerate(self.kept)}
        return tuple(
            places[i if g is None else self.layers.at(i, self.first[g])]
            for i, g in enumerate(self.group)
        )

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Return the tensors of the step that the folded one has."""
        graph = self.layers.graph
        found = set(graph.tangents) | {t for i in self.kept for t in written(graph.operators[i])}
        for i in self.kept:
            for one in ways(graph.operators[i]):
                found.update(graph.resident.intersection(one.reads or ()))
        return tuple(sorted(found))

    @cached_property
    def image(self) -> dict[int, int]:
        """Map each tensor of the step to the folded tensor that stands for it."""
        places = {t: n for n, t in enumerate(self.tensors)}
        found = dict(places)
        for t, (i, slot) in self.layers.home.items():
            g = self.group[i]
            if g is not None:
                first = self.layers.at(i, self.first[g])
                found[t] = places[written(self.layers.graph.operators[first])[slot]]
        return found

    @cached_property
    def graph(self) -> Graph:
        """Return the folded step, with the least seconds and workspace of each group's layers."""
        whole, own = self.layers.graph, set(self.tensors)

        def kept(tensors: tuple[int, ...]) -> list[int]:
            return [self.image[t] for t in tensors if t in own]

        return Graph(
            [whole.tensors[t] for t in self.tensors],
            [self._folded(i) for i in self.kept],
            outputs=kept(whole.outputs),
            gradients=kept(whole.gradients),
            tangents=kept(whole.tangents),
            tangents_held=whole.tangents_held,
            boundary_bytes=whole.boundary_bytes,
            extra_resident_bytes=whole.extra_resident_bytes,
            allocator_owned=kept(whole.allocator_owned),
            repeated=whole.repeated,
            written_back=kept(whole.written_back),
        )

    def _folded(self, i: int) -> Operator:
        operator, g = self.layers.graph.operators[i], self.group[i]
        alike = [operator]
        if g is not None:
            members = range(self.first[g], self.first[g] + self.groups[g])
            alike = [self.layers.graph.operators[self.layers.at(i, one)] for one in members]
        choices = tuple(
            self._moved_to(i, _least(choice, [x.implementations[n] for x in alike]))
            for n, choice in enumerate(operator.implementations)
        )
        return self._moved_to(i, _least(replace(operator, implementations=choices), alike))

    def _moved_to(self, i: int, one: One) -> One:
        """Return an operator, or one implementation, with the folded step's tensors."""
        reads, writes = (
            None if many is None else tuple(self.folded_tensor(i, t) for t in many)
            for many in (one.reads, one.writes)
        )
        over = tuple(self.folded_tensor(i, t) for t in one.in_place)
        return replace(one, reads=reads, writes=writes, in_place=over)

    def folded_tensor(self, i: int, t: int) -> int:
        """Return the folded step's tensor that the counterpart of operator i reads or writes in
        place of the step's tensor t."""
        g, home = self.group[i], self.layers.home.get(t)
        if g is None or home is None or self.group[home[0]] is None:
            return self.image[t]
        layer, own = self.layers.layer[home[0]], self.layers.layer[i]
        assert layer is not None
        assert own is not None
        maker = self.layers.at(home[0], self.first[g + layer - own])
        return self.image[written(self.layers.graph.operators[maker])[home[1]]]


def _least(one: One, alike: Sequence[Operator] | Sequence[Implementation]) -> One:
    """Return one of several like operators, with the least seconds and workspace of all."""
    return replace(
        one,
        time_s=min(x.time_s for x in alike),
        workspace_bytes=min(x.workspace_bytes for x in alike),
    )


@dataclass(frozen=True, eq=False)
class Unfolding:
    """Turns runs and flags of a folded step into those of the whole step.

    A folded operator stands for the operators of a group of layers. A repeated run just before its
    first run becomes repeated runs in the whole step. If the groups of both are at most `reach`
    apart, there is one before each of these operators, in the layer at the same distance. Otherwise
    all of them come before the first of these operators.

    Attributes:
        folding: of the whole step.
        folded, whole: the variants of both.
        reach: the most groups between an operator and a run that is repeated for it.
    """

    folding: Folding
    folded: RunTable
    whole: RunTable
    reach: int

    @cached_property
    def image(self) -> Ints:
        """Map tensors of the whole step to the folded step's."""
        found = np.zeros(len(self.whole.graph.tensors), dtype=np.int64)
        for t, n in self.folding.image.items():
            found[t] = n
        return found

    def decisions(self, at: Decisions) -> Decisions:
        """Return decisions of the folded step as the whole step's."""
        return Decisions(self.runs(at.runs), self.flags(at.stays), self.flags(at.first))

    def flags(self, flags: Flags) -> Flags:
        """Extend flags of the folded step's tensors to the tensors they stand for."""
        found: Flags = flags[self.image]
        return found

    def runs(self, runs: Ints) -> Ints:
        """Return the whole step's runs. An operator that the first layer of a group does not run in
        its place runs there all the same if another layer of the group needs it."""
        from memopt.strategies.joint.lifetime_kernels import first_absent

        found, idle = self._placed(runs)
        whole = self._sorted(found)
        while idle:
            absent = first_absent(self.whole.arrays, whole)
            maker = self.whole.graph.producer.get(absent)
            n = BOUNDARY if maker is None else self.folding.number[maker]
            if n not in idle:
                break
            idle.remove(n)
            found.append((*self._first(n, self.folded.number[n, None]), 0))
            whole = self._sorted(found)
        return whole

    def _placed(self, runs: Ints) -> tuple[list[tuple[Ints, Ints, int]], set[int]]:
        """Return rows (positions, variants, part) for the runs of a folded step, and the operators
        that do not run in their place. The repeated runs before a first run are numbered by part; a
        new part begins where they leave the order of the operators."""
        found, pending = list[tuple[Ints, Ints, int]](), list[tuple[int, int]]()
        idle = set(range(len(self.folding.kept)))
        highest, part, latest = -1, 0, -1
        for run in runs.tolist():
            i = BOUNDARY if run == BOUNDARY else self.folded.variants[run][0]
            if i != BOUNDARY and i <= highest:
                part, latest = part + (i <= latest), i
                pending.append((part, run))
                continue
            highest, part, latest = max(highest, i), 0, -1
            found += [(*self._repeated(i, one), n) for n, one in pending]
            found.append((*self._first(i, run), 0))
            idle.discard(i)
            pending = []
        return found, idle

    def _sorted(self, found: list[tuple[Ints, Ints, int]]) -> Ints:
        """Return the variants of rows sorted by (position, part, variant), each row once."""
        parts, many = 1 + max(n for *_, n in found), len(self.whole.variants) + 1
        keys = [(positions * parts + n) * many + variants for positions, variants, n in found]
        whole: Ints = np.unique(np.concatenate(keys)) % many - 1
        return whole

    def _first(self, i: int, run: int) -> tuple[Ints, Ints]:
        """Return (positions, variants) of the first runs of folded operator i."""
        boundary = np.zeros(1, dtype=np.int64)
        variants = boundary if i == BOUNDARY else self._variants(self._members[i], run)
        return self._before(i) + 1, variants

    def _before(self, i: int) -> Ints:
        """Return the positions just before the operators that folded operator i stands for."""
        if i == BOUNDARY:
            return np.array([4 * self.whole.graph.first_backward])
        return 4 * self._members[i] + 2

    def _repeated(self, i: int, run: int) -> tuple[Ints, Ints]:
        """Return (positions, variants) of a repeated run before folded operator i."""
        n = self.folded.variants[run][0]
        others, before, folding = self._members[n], self._before(i), self.folding
        own = None if i == BOUNDARY else self._group[i]
        other = self._group[n]
        if own is None or other is None or abs(other - own) > self.reach:
            return before[:1], self._variants(others, run)
        core, layers = folding.layers.core, self._layer[self._members[i]]
        there = np.clip(layers + other - own, core.start, core.stop - 1)
        first = int(others[0])
        step = folding.layers.at(first, int(self._layer[first]) + 1) - first
        return before, self._variants(first + (there - self._layer[first]) * step, run)

    def _variants(self, operators: Ints, run: int) -> Ints:
        """Return the variants by which operators run as a folded run does, counted from 1."""
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
        """Return the group of each of the folded step's operators."""
        return [self.folding.group[i] for i in self.folding.kept]

    @cached_property
    def _layer(self) -> Ints:
        layers = [-1 if layer is None else layer for layer in self.folding.layers.layer]
        return np.array(layers, dtype=np.int64)

    @cached_property
    def _members(self) -> list[Ints]:
        """List, ascending, the operators that each folded operator stands for."""
        number = np.array(self.folding.number, dtype=np.int64)
        return [np.flatnonzero(number == n) for n in range(len(self.folding.kept))]
