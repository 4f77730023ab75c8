"""The relaxation of a step of equal layers: variables for groups of them.

It is the `LinkedModel` of a smaller step: one layer of each group (`Folding`), with the loss
boundary as its only time point. A variable X of a group of n layers is the sum of the layers'
variables x[l], between 0 and n. Each row is a sum of the layers' rows:

    x[l] ≤ Σ y[l]      of a layer's own tensors     X ≤ Σ Y
    x[l] ≤ Σ z         of tensors from outside      X ≤ n Σ z
    x[l] ≤ Σ y[l-1]    of the layer before          X ≤ Σ (Y - last(Y)) + last(Y')

Y' belongs to the group before. last(Y) is the share of Y in its group's last layer: between 0 and
1, at most Y and at least Y - (n - 1). Where a layer reads the layer after it, the group's
first layer takes the place of the last. For an operator with several implementations, X for each,
there is U: how many layers run it at all (U ≤ Σ X; X ≤ U for each). U needs the tensors that all of
them read, and provides those that all of them write. Every point of the step's relaxation gives one
of this program, so that its optimum is a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memopt.models.bounds import needed_operators
from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant
from memopt.solvers.binary_program import BinaryProgram, Term
from memopt.strategies.joint.folding import Folding
from memopt.strategies.joint.relaxation import LinkedModel

LAST, FIRST = -1, 1
"""The layer of a group that its neighbour reads: the group before reads the first."""


def sure_runs(graph: Graph) -> frozenset[int]:
    """Return the operators that every program runs where the framework does: backward ones, and
    forward ones that forward results or effects need. Others may run after the boundary only."""
    count = graph.first_backward
    made = {t for operator in graph.operators[:count] for t in operator.writes}
    forward = Graph(
        graph.tensors, graph.operators[:count], outputs=sorted(made.intersection(graph.outputs))
    )
    backward = (i for i in needed_operators(graph) if i >= count)
    return needed_operators(forward).union(backward)


@dataclass
class GroupProgram(BinaryProgram):
    """A program whose variables are sums over groups of layers.

    Attributes:
        groups: how many layers each group has.
        group: variable → its group; variables outside of groups are missing.
        name: variable → what it stands for in each layer ("s" of a certain tensor, say).
        twins: (such a name, group) → variable: the same thing in another group.
    """

    groups: Sequence[int] = ()
    group: dict[int, int] = field(default_factory=dict)
    twins: dict[tuple[object, int], int] = field(default_factory=dict)
    name: dict[int, object] = field(default_factory=dict)
    any_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of layers that run an operator at all, by its runs under each implementation."""
    _all_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _said: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = field(default_factory=dict)
    _ends: dict[tuple[int, int], int] = field(default_factory=dict)

    def together(self, variables: Sequence[int], name: object, group: int | None) -> None:
        """Declare that these variables are the runs of one operator, one variable for each
        implementation."""
        runs = self.belongs(self.variable(), name, group)
        self.any_of[tuple(variables)] = runs
        self._all_of |= dict.fromkeys(variables, tuple(variables))
        self.add([(1, runs), *((-1, v) for v in variables)], 0)
        for v in variables:
            self.add([(1, v), (-1, runs)], 0)

    def _joined(self, variables: Iterable[int]) -> list[int]:
        """Return variables in which the runs of an operator by any implementation replace its runs
        by each."""
        found = list(dict.fromkeys(variables))
        for v in tuple(found):
            together = self._all_of.get(v, ())
            if together and set(together) <= set(found):
                found = [x for x in found if x not in together] + [self.any_of[together]]
        return found

    def belongs(self, v: int, name: object, group: int | None) -> int:
        """Record what a variable is of each layer, and its group, if any; return the variable."""
        if group is None:
            return v
        self.group[v], self.name[v], self.twins[name, group] = group, name, v
        self.most[v] = self.groups[group]
        return v

    def at_most_one(self, variables: Iterable[int]) -> None:
        variables = list(variables)
        self.add([(1, v) for v in variables], self._layers(variables))

    def at_least_one(self, variables: Iterable[int]) -> None:
        variables = self._joined(variables)
        self.add([(-1, v) for v in variables], -self._layers(variables))

    def _layers(self, variables: Sequence[int]) -> int:
        return max((self.most.get(v, 1) for v in variables), default=1)

    def implies_any(self, left: int, right: Iterable[int]) -> None:
        right = self._joined(right)
        self._implies_any(left, right)
        together = self._all_of.get(left)
        if together is not None:
            said = self._said.setdefault((together, tuple(right)), set())
            new = left not in said
            said.add(left)
            if new and len(said) == len(together):
                # By whichever implementation.
                self._implies_any(self.any_of[together], right)

    def _implies_any(self, left: int, right: Sequence[int]) -> None:
        own, terms = self.group.get(left), list[Term]([(1, left)])
        for x in right:
            other = self.group.get(x)
            if other is None:
                terms.append((-self.most.get(left, 1), x))
            elif own is None or other == own:
                terms.append((-1, x))
            else:
                side = FIRST if other > own else LAST
                twin = self.twins.get((self.name[x], own))
                terms.append((-1, self.end(x, side)))
                if self.groups[own] > 1:
                    if twin is None:
                        return  # Nothing is known of the other layers.
                    terms += [(-1, twin), (1, self.end(twin, side))]
        self.add(terms, 0)

    def end(self, x: int, side: int) -> int:
        """Return the share of a variable that belongs to its group's first or last layer."""
        size = self.most.get(x, 1)
        if size == 1:
            return x
        if (x, side) not in self._ends:
            e = self._ends[x, side] = self.variable()
            self.add([(1, e), (-1, x)], 0)
            self.add([(1, x), (-1, e)], size - 1)
        return self._ends[x, side]


@dataclass
class AggregatedModel(LinkedModel):
    """The relaxation of a step and its link, by groups of equal layers; `graph` is folded."""

    folding: Folding = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.at:
            raise ValueError("layers of a group are on one side of each time point: the boundary")
        super().__post_init__()
        must = sure_runs(self.folding.layers.graph)
        short = {n for i, n in enumerate(self.folding.number) if i not in must}
        for i in range(self.count):
            if i in short:
                continue
            # Otherwise a group's layers could all run on results of the layer before the group.
            self.model.at_least_one(self.run[i])

    def new_program(self) -> BinaryProgram:
        folding = self.folding
        self.groups = folding.groups
        self.group = [folding.group[i] for i in folding.kept]
        """Group of each operator of the folded step."""
        self.of_tensor = {
            folding.image[t]: (folding.group[i], slot, self._place(i))
            for t, (i, slot) in folding.layers.home.items()
        }
        """Computed tensor of the folded step → (group, slot and operator place in each layer)."""
        self.there = {what: t for t, what in self.of_tensor.items()}
        return GroupProgram(groups=self.groups)

    def _place(self, i: int) -> int:
        """Return the operator of the first group's layer that has the same place in its layer as an
        operator of the step."""
        folding = self.folding
        return i if folding.group[i] is None else folding.layers.at(i, folding.first[0])

    def run_variables(self, i: int, point: int = -1) -> list[int]:
        variables, group = super().run_variables(i, point), self.group[i]
        place = self._place(self.folding.kept[i])
        for n, v in enumerate(variables):
            self._program.belongs(v, ("run", point, place, n), group)
        if len(variables) > 1:
            self._program.together(variables, ("any", point, place), group)
        return variables

    def tensor_variable(self, t: int, kind: str, point: int) -> int:
        v = super().tensor_variable(t, kind, point)
        group, *what = self.of_tensor[t]
        return self._program.belongs(v, (kind, point, *what), group)

    @property
    def _program(self) -> GroupProgram:
        assert isinstance(self.model, GroupProgram)
        return self.model

    def _operands(self, i: int, choice: Operator | Variant) -> tuple[int, ...]:
        own = self.group[i]
        if own is None or self.groups[own] == 1:
            return choice.reads
        # Inside the group, a layer reads of the one before what the first reads of the one before
        # it.
        seen = [self.of_tensor[t] for t in choice.reads if t in self.of_tensor]
        inside = [self.there[own, slot, place] for g, slot, place in seen if g is not None]
        return (*choice.reads, *inside)

    def _needed_operators(self) -> frozenset[int]:
        needed = needed_operators(self.folding.layers.graph)
        return frozenset(range(self.count)) - {
            n for i, n in enumerate(self.folding.number) if i not in needed
        }

    def _suffixes(self) -> list[int]:
        def begin(i: int) -> int:
            """Return the first operator of a group's layer."""
            g = self.group[i]
            while g is not None and self.groups[g] > 1 and i and self.group[i - 1] == g:
                i -= 1
            return i

        return sorted({begin(i) for i in super()._suffixes()})
