"""Alternatives of a stage: ways to save less of it, to run part of it again inside its backward,
and to run its operators by other implementations.

Each distinct stage is a small training step of its own, solved by the graph model (`time_points`,
at the stage's own boundary) for a handful of limits on the bytes its forward saves. The stage's
input a^{ℓ-1} and its output a^ℓ are in memory in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from memopt.models.chain import Stage
from memopt.models.graph import Graph, Implementation, Operator, Tensor, TensorKind
from memopt.models.variants import Variant, variant
from memopt.programs.instructions import Compute, Instruction, LossBoundary
from memopt.reductions.linearize import Linearization
from memopt.reductions.stage_costs import running_peak_bytes
from memopt.reductions.stage_map import StageOperators
from memopt.solvers.recent import RecentAnswers
from memopt.solvers.running import Deadline, Solver, SolverOptions
from memopt.strategies.shared.graph_model import Allowed
from memopt.strategies.shared.time_points import TimePointModel

MOST = 8
"""The most alternatives of a stage beside the plain one."""
SOLVE_S = 2.0
GAP = 1e-3
TIE = 1e-6
"""Share of the stage's time that all its bytes cost: the smallest of equally fast ones wins."""

Run = tuple[int, str | None]
"""(place of an operator in its stage, implementation)."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to keep a stage for its backward.

    Attributes:
        forward: the runs of F_all, operators that run only once left out.
        backward: those of B^ℓ, repeated runs included, in order.
        saved_bytes, forward_time_s, backward_time_s: ω_ā, u_f of F_all and u_b.
        forward_overhead_bytes, backward_overhead_bytes: o_f of F_all and o_b.
    """

    forward: tuple[Compute, ...]
    backward: tuple[Compute, ...]
    saved_bytes: int
    forward_time_s: float
    backward_time_s: float
    forward_overhead_bytes: int
    backward_overhead_bytes: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """An alternative of all stages that are alike, in places within the stage."""

    saved: frozenset[int]
    forward: tuple[Run, ...]
    backward: tuple[Run, ...]


_RECENT = RecentAnswers[tuple[Recipe, ...]](capacity=1000)
"""Recipes of distinct stages: a model's are solved once for all budgets."""


def stage_alternatives(
    view: Linearization, allowed: Allowed | None = None, deadline: Deadline | None = None
) -> list[list[Alternative]]:
    """Find the alternatives of every stage of the chain, the first of each being the plain one."""
    sizes = [tensor.size_bytes for tensor in view.graph.tensors]
    deadline = deadline or Deadline()
    found: list[list[Alternative]] = []
    for k, stage in enumerate(view.chain.stages):
        plain = _plain(view, k, stage)
        found.append([plain])
        if k >= len(view.stages) or not view.stages[k].backward or not deadline.left_s:
            continue
        work = _Stage(view, k, allowed, sizes)
        recipes = _RECENT.get(
            (work.signature(), plain.saved_bytes),
            partial(work.recipes, plain.saved_bytes, deadline),
            lambda _: deadline.left_s > 0,
        )
        best = [plain]
        for recipe in recipes:
            alternative = work.alternative(recipe)
            if not any(_as_good(other, alternative) for other in best):
                best.append(alternative)
        found[-1] = best
    return found


def _as_good(one: Alternative, other: Alternative) -> bool:
    seconds = one.forward_time_s + one.backward_time_s
    return (
        seconds <= other.forward_time_s + other.backward_time_s
        and one.saved_bytes <= other.saved_bytes
        and one.forward_overhead_bytes <= other.forward_overhead_bytes
        and one.backward_overhead_bytes <= other.backward_overhead_bytes
    )


def _plain(view: Linearization, k: int, stage: Stage) -> Alternative:
    own = view.stages[k] if k < len(view.stages) else None
    return Alternative(
        plain_runs(own.rerun) if own else (),
        plain_runs(own.backward) if own else (),
        stage.saved_bytes,
        stage.forward_time_s,
        stage.backward_time_s,
        stage.forward_overhead_bytes,
        stage.backward_overhead_bytes,
    )


class _Stage:
    """One stage; tensors and operators by their place in it, so that repeated stages are alike."""

    def __init__(
        self, view: Linearization, k: int, allowed: Allowed | None, sizes: list[int]
    ) -> None:
        self.graph: Graph = view.graph
        self.sizes = sizes
        """Bytes of the graph's tensors."""
        self.stage: StageOperators = view.stages[k]
        self.held = view.held
        previous = view.stages[k - 1] if k else None
        self.source = _one(previous.output if previous is not None else None)
        self.output = _one(self.stage.output)
        self.later = previous.gradients if previous is not None else frozenset()
        results = frozenset(t for after in view.stages[k + 1 :] for t in after.results)
        self.given = self.stage.gradients | results
        """Tensors in memory for the backward: δ^ℓ, and results of the step made before."""
        self.operators = (*self.stage.rerun, *self.stage.backward)
        """Operator of the graph by place."""
        self.choices = self._implementations(allowed)
        own: dict[int, None] = {}
        for operator in self.choices:
            for t in (*operator.reads, *operator.writes):
                own.setdefault(t)
            for choice in operator.implementations:
                own.update(dict.fromkeys((*(choice.reads or ()), *(choice.writes or ()))))
        own.update(dict.fromkeys(sorted(self.stage.gradients)))
        self.tensors = list(own)
        self.local = {t: n for n, t in enumerate(own)}
        self.small = self._small()

    def _implementations(self, allowed: Allowed | None) -> list[Operator]:
        """Return the stage's operators with those implementations that can be fed within the stage,
        and that write every tensor other stages read."""
        graph = self.graph
        there = self.source | self.held | graph.resident | self.given
        there |= frozenset(graph.tangents)
        once = {t for i in self.stage.once for t in graph.operators[i].reads}
        outside = self.output | self.held | once
        found: list[Operator] = []
        for i in self.operators:
            operator = graph.operators[i]
            fed: list[Implementation] = []
            needed = outside.intersection(operator.writes)
            for choice in operator.implementations:
                figures = variant(operator, choice.name)
                possible = there.issuperset(figures.reads) and needed <= set(figures.writes)
                if possible and (allowed is None or allowed(operator, choice.name)):
                    fed.append(choice)
                    there |= frozenset(figures.writes)
            there |= frozenset(operator.writes)
            found.append(replace(operator, implementations=tuple(fed)))
        return found

    def _small(self) -> Graph:
        """Return the stage as a training step; tensors in memory in any case have no bytes."""
        graph, local = self.graph, self.local
        around = graph.resident | self.source | self.held
        made = {t for op in self.choices for t in op.writes} - around
        given = (self.given | frozenset(graph.tangents)).intersection(local) - around - made
        tensors = []
        for n, t in enumerate(self.tensors):
            whole = graph.tensors[t]
            if t in around:
                whole = replace(whole, size_bytes=0, kind=TensorKind.INPUT)
            elif t in given:
                whole = replace(whole, size_bytes=0)
            tensors.append(Tensor(str(n), whole.size_bytes, whole.kind))
        results = (self.later | self.stage.results) & made
        return Graph(
            tensors,
            [self._localized(operator, around) for operator in self.choices],
            outputs=sorted(local[t] for t in self.output & made),
            gradients=sorted(local[t] for t in results),
            tangents=sorted(local[t] for t in given),
            tangents_held=False,
        )

    def _localized(self, operator: Operator, around: frozenset[int]) -> Operator:
        def there(tensors: Iterable[int]) -> tuple[int, ...]:
            return tuple(self.local[t] for t in tensors)

        def written(tensors: Iterable[int]) -> tuple[int, ...]:
            return there(t for t in tensors if t not in around)

        choices = tuple(
            replace(
                choice,
                reads=None if choice.reads is None else there(choice.reads),
                writes=None if choice.writes is None else written(choice.writes),
                in_place=(),
            )
            for choice in operator.implementations
        )
        return replace(
            operator,
            reads=there(operator.reads),
            writes=written(operator.writes),
            implementations=choices,
            in_place=(),
        )

    def signature(self) -> object:
        """Return a value that is equal for stages that are the same problem."""
        nameless = tuple(replace(op, name="", module="", target="") for op in self.small.operators)
        sizes = tuple(tensor.size_bytes for tensor in self.small.tensors)
        kinds = tuple(tensor.resident for tensor in self.small.tensors)
        ends = (self.small.outputs, self.small.gradients, self.small.tangents)
        return nameless, sizes, kinds, ends

    def recipes(self, most_bytes: int, deadline: Deadline) -> tuple[Recipe, ...]:
        """Choose what to save and how to run, for limits from all of ω_ā down to the least."""
        built = TimePointModel(self.small)
        for variables in built.run[: built.first]:
            built.model.exactly_one(variables)
        total = sum(self.size(t) for t in built.s[0]) or 1
        price = TIE * (sum(built.model.costs.values()) or 1.0) / total
        options = SolverOptions(Solver.HIGHS, SOLVE_S)
        answer = built.model.solve(None, options)
        if not answer.values:
            return ()
        least = self._saved_bytes(built, answer.values)
        for t, v in built.s[0].items():
            built.model.costs[v] = price * self.size(t)
        found: dict[Recipe, None] = {}
        limit = most_bytes
        for step in reversed(range(MOST)):
            limit = min(limit, least + (most_bytes - least) * step // (MOST - 1))
            if limit < least or not deadline.left_s:
                break
            answer = built.model.solve(limit, replace(options, gap=GAP))
            if not answer.values:
                break
            found[self._recipe(built, answer.values)] = None
            limit = min(limit, self._saved_bytes(built, answer.values)) - 1
        return tuple(found)

    def size(self, n: int) -> int:
        """Return the bytes of the tensor at a place."""
        return self.small.tensors[n].size_bytes

    def _saved_bytes(self, built: TimePointModel, values: tuple[bool, ...]) -> int:
        return sum(self.size(t) for t, v in built.s[0].items() if values[v])

    def _recipe(self, built: TimePointModel, values: tuple[bool, ...]) -> Recipe:
        saved = frozenset(t for t, v in built.s[0].items() if values[v])
        steps = built.program(values).instructions
        boundary = steps.index(LossBoundary())
        return Recipe(saved, _runs(steps[:boundary]), _runs(steps[boundary:]))

    def alternative(self, recipe: Recipe) -> Alternative:
        """Compute an alternative's figures, by running the stage's own operators."""
        graph, stage, sizes = self.graph, self.stage, self.sizes
        kept = frozenset(self.tensors[n] for n in recipe.saved) - self.held | self.output

        def computes(runs: Iterable[Run]) -> tuple[Compute, ...]:
            return tuple(Compute(self.operators[n], (), name) for n, name in runs)

        def figures(runs: Iterable[Compute]) -> list[Operator | Variant]:
            return [variant(graph.operators[run.op], run.implementation) for run in runs]

        def total(tensors: Iterable[int]) -> int:
            return sum([sizes[t] for t in tensors])

        forward, backward = computes(recipe.forward), computes(recipe.backward)
        first = first_run(stage, forward)
        saving = self.source | kept
        need = max(
            running_peak_bytes(figures(first), sizes, self.source, saving, self.held),
            running_peak_bytes(figures(forward), sizes, self.source, saving),
        )
        before = saving | stage.gradients
        after = self.source | self.later | stage.results
        peak = running_peak_bytes(figures(backward), sizes, before, after)
        counted = (self.source, kept, stage.gradients, self.later, stage.results)
        return Alternative(
            forward,
            backward,
            total(kept),
            sum(run.time_s for run in figures(forward)),
            sum(run.time_s for run in figures(backward)),
            need - total(self.source) - total(kept),
            peak - sum(map(total, counted)),
        )


def plain_runs(operators: Iterable[int]) -> tuple[Compute, ...]:
    """Run operators once each, by their default implementations."""
    return tuple(Compute(i, ()) for i in operators)


def first_run(stage: StageOperators, forward: Sequence[Compute]) -> list[Compute]:
    """List the operators of a stage's first forward: those of an alternative, and those that run
    only once."""
    return sorted((*forward, *plain_runs(stage.once)), key=lambda run: run.op)


def _runs(instructions: Iterable[Instruction]) -> tuple[Run, ...]:
    return tuple((x.op, x.implementation) for x in instructions if isinstance(x, Compute))


def _one(tensor: int | None) -> frozenset[int]:
    return frozenset() if tensor is None else frozenset({tensor})
