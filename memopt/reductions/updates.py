"""Whole steps for strategies that plan a forward and a backward: updates come as early as they can.

Such a strategy plans the step up to its gradients, and each parameter's update then follows the
last computation that reads the parameter or touches its gradient (OLLA §4.3), which frees the
gradient. A random update also follows the random operators before it. In a schedule of a chain no
stage runs again after its backward, so a gradient lives in the stage that completes it if that is
the last one to need the parameter, and the chain's costs can say so: such a gradient is an overhead
of that stage's backward, not a result that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memopt.models.chain import Stage
from memopt.models.graph import Graph, Phase
from memopt.models.steps import ChainStep
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Free, Instruction, Program
from memopt.programs.liveness import with_frees
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.lower import lower_steps
from memopt.reductions.stage_map import StageOperators


def without_updates(graph: Graph) -> Graph:
    """The step up to its gradients, which then are its results; tensors and the other operators
    keep their indices.

    Raises:
        ValueError: an update is not at the end of the operators.
    """
    count = len(graph.operators) - len(_updates(graph))
    if any(operator.phase is Phase.UPDATE for operator in graph.operators[:count]):
        raise ValueError("without_updates: updates must come after all other operators")
    gradients = [t for i in _updates(graph) for t in graph.operators[i].reads]
    results = (t for t in (*graph.gradients, *gradients) if t not in graph.resident)
    return replace(
        graph, operators=graph.operators[:count], gradients=tuple(dict.fromkeys(results))
    )


def with_early_updates(graph: Graph, program: Program) -> Program:
    """A program of `without_updates(graph)` with the graph's updates, each as early as it can be.

    What is computed in place, and addresses, must be decided afterwards.
    """
    last: dict[int, int] = {}
    drawn: dict[int, int] = {}
    """Random operator → its first run."""
    for position, run in program.computes:
        if graph.operators[run.op].random:
            drawn.setdefault(run.op, position)
        chosen = variant(graph.operators[run.op], run.implementation)
        last.update(dict.fromkeys((*chosen.reads, *chosen.writes), position))
    after: dict[int, list[int]] = {}
    for index in _updates(graph):
        position = max((last.get(t, 0) for t in graph.operators[index].reads), default=0)
        if graph.operators[index].random:
            position = drawn[index] = max([position, *drawn.values()])
        after.setdefault(position, []).append(index)
    listed: list[Instruction] = []
    ready: list[Instruction] = []
    for position, instruction in enumerate(program):
        # What dies with the last user goes first.
        if ready and not isinstance(instruction, Free):
            listed += ready
            ready = []
        listed.append(instruction)
        ready += [Compute(index, ()) for index in after.get(position, ())]
    listed += ready
    return Program(with_frees(graph, listed))


@dataclass(frozen=True)
class StepLinearization(Linearization):
    """A whole step, updates included, seen as the chain of its forward and backward.

    Attributes:
        plain: the same for the step without updates.
    """

    plain: Linearization = field(kw_only=True)

    def lower(self, steps: Sequence[ChainStep], budget_bytes: int | None = None) -> Program:
        """The program of a chain schedule, updates included, computing in place what can be."""
        return with_in_place(
            self.graph, with_early_updates(self.graph, lower_steps(self.plain, steps))
        )


def linearize_step(graph: Graph) -> StepLinearization:
    """Cut a step with updates into the stages of a chain.

    Its budget is the whole step's: the programs that `lower` makes need at most the memory of
    their schedules.

    Raises:
        ValueError: as `without_updates`.
    """
    view = linearize(without_updates(graph))
    homes = _homes(graph, view.stages)
    stages = [
        _with_updates(graph, stage, operators, [i for i, home in homes.items() if home == k])
        for k, (stage, operators) in enumerate(zip(view.chain.stages, view.stages, strict=False))
    ]
    chain = replace(view.chain, stages=(*stages, *view.chain.stages[len(stages) :]))
    return StepLinearization(
        graph, chain, view.stage_map, view.articulation_points, view.max_span, plain=view
    )


def _updates(graph: Graph) -> list[int]:
    return [i for i, x in enumerate(graph.operators) if x.phase is Phase.UPDATE]


def _homes(graph: Graph, stages: Sequence[StageOperators]) -> dict[int, int]:
    """Update → index of the stage after whose backward nothing needs its operands: the first, by
    index, that does. A random update waits for the random operators before it, too."""
    stage_of = {i: k for k, one in enumerate(stages) for i in (*one.forward, *one.backward)}
    homes: dict[int, int] = {}
    draws = {k for i, k in stage_of.items() if _draws(graph, i)}
    """Stages with random operators in their backward, and random updates."""
    for index in _updates(graph):
        users = {graph.producer.get(t, index) for t in graph.operators[index].reads}
        users.update(i for t in graph.operators[index].reads for i in graph.readers[t])
        found = {stage_of[i] for i in users if i in stage_of}
        homes[index] = min(found | draws if graph.operators[index].random else found, default=0)
        if graph.operators[index].random:
            draws.add(homes[index])
    return homes


def _draws(graph: Graph, index: int) -> bool:
    operator = graph.operators[index]
    return operator.random and operator.phase is Phase.BACKWARD


def _with_updates(
    graph: Graph, stage: Stage, operators: StageOperators, updates: Sequence[int]
) -> Stage:
    """A stage's costs with the updates that run in its backward."""
    mine = [graph.operators[index] for index in updates]
    read = {t for update in mine for t in update.reads}
    released = sum(graph.tensors[t].size_bytes for t in operators.results & read - graph.kept)
    workspace_bytes = max((update.workspace_bytes for update in mine), default=0)
    return replace(
        stage,
        backward_time_s=stage.backward_time_s + sum(update.time_s for update in mine),
        parameter_gradient_bytes=stage.parameter_gradient_bytes - released,
        backward_overhead_bytes=stage.backward_overhead_bytes + released + workspace_bytes,
    )
