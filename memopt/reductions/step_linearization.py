"""Makes the chain of a whole step: each update is in the stage that completes its gradient. Adds
updates to programs of strategies that plan the step up to its gradients.

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
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Free, Instruction, Program
from memopt.programs.liveness import with_frees
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.lower import lower_steps
from memopt.reductions.stage_map import StageOperators


@dataclass(frozen=True)
class StepLinearization(Linearization):
    """A whole step, updates included, seen as the chain of its forward and backward."""

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


def without_updates(graph: Graph) -> Graph:
    """Return the step up to its gradients, which become its results; tensors and the other
    operators keep their indices.

    Raises:
        ValueError: an update is not at the end of the operators.
    """
    count = len(graph.operators) - len(updates_of(graph))
    if any(operator.phase is Phase.UPDATE for operator in graph.operators[:count]):
        raise ValueError("without_updates: updates must come after all other operators")
    gradients = [t for i in updates_of(graph) for t in graph.operators[i].reads]
    results = (t for t in (*graph.gradients, *gradients) if t not in graph.resident)
    return replace(
        graph, operators=graph.operators[:count], gradients=tuple(dict.fromkeys(results))
    )


def with_early_updates(graph: Graph, program: Program) -> Program:
    """Add the graph's updates to a program of `without_updates(graph)`, each as early as it can be.

    An update follows the last computation that reads its parameter or touches its gradient (OLLA
    §4.3), and frees the gradient. A random one also follows the random operators before it.
    In-place outputs and addresses must be decided afterwards.
    """
    last: dict[int, int] = {}
    drawn: dict[int, int] = {}
    """First run of each random operator."""
    for position, run in program.computes:
        if graph.operators[run.op].random:
            drawn.setdefault(run.op, position)
        chosen = variant(graph.operators[run.op], run.implementation)
        last.update(dict.fromkeys((*chosen.reads, *chosen.writes), position))
    after: dict[int, list[int]] = {}
    for index in updates_of(graph):
        position = max((last.get(t, 0) for t in graph.operators[index].reads), default=0)
        if graph.operators[index].random:
            position = drawn[index] = max([position, *drawn.values()])
        after.setdefault(position, []).append(index)
    listed: list[Instruction] = []
    ready: list[Instruction] = []
    for position, instruction in enumerate(program):
        # Tensors that die with the last user are freed first.
        if ready and not isinstance(instruction, Free):
            listed += ready
            ready = []
        listed.append(instruction)
        ready += [Compute(index, ()) for index in after.get(position, ())]
    listed += ready
    return Program(with_frees(graph, listed))


def updates_of(graph: Graph) -> list[int]:
    """Return the indices of the operators that update parameters."""
    return [i for i, x in enumerate(graph.operators) if x.phase is Phase.UPDATE]
