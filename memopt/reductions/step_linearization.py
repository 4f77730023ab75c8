"""Makes the chain of a whole step: each update is in the stage that completes its gradient.

In a schedule of a chain no stage runs again after its backward. So a gradient lives only in the
stage that completes it, if no later stage needs the parameter. The chain charges such a gradient as
an overhead of that stage's backward, not as a result that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memopt.models.chain import Stage
from memopt.models.graph import Graph, Phase
from memopt.models.steps import ChainStep
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.lower import lower_steps
from memopt.reductions.stage_map import StageOperators
from memopt.reductions.updates import updates_of, with_early_updates, without_updates


@dataclass(frozen=True)
class StepLinearization(Linearization):
    """A whole step, updates included, seen as the chain of its forward and backward.

    Attributes:
        plain: the linearization of the step without updates.
    """

    plain: Linearization = field(kw_only=True)

    def lower(self, steps: Sequence[ChainStep], budget_bytes: int | None = None) -> Program:
        """Lower a chain schedule to a program with updates, in place where possible."""
        return with_in_place(
            self.graph, with_early_updates(self.graph, lower_steps(self.plain, steps))
        )


def linearize_step(graph: Graph) -> StepLinearization:
    """Cut a step with updates into the stages of a chain.

    Its budget is the whole step's: the programs that `lower` makes need at most the memory of their
    schedules.

    Raises:
        ValueError: an update is not at the end of the operators.
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


def _homes(graph: Graph, stages: Sequence[StageOperators]) -> dict[int, int]:
    """Map each update to the index of its stage: the lowest with an operator that makes or reads
    one of the update's operands. A random update also waits for the random operators before it."""
    stage_of = {i: k for k, one in enumerate(stages) for i in (*one.forward, *one.backward)}
    homes: dict[int, int] = {}
    draws = {k for i, k in stage_of.items() if _draws(graph, i)}
    """Stages with random operators in their backward, and random updates."""
    for index in updates_of(graph):
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
    """Return a stage's costs with the updates that run in its backward."""
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
