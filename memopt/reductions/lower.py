"""Lowers chain steps to a program: applies the stage map to a schedule, and frees by liveness.

Law: the program's replayed peaks, on the device and on the host, are at most the schedule's own,
and so is its time without transfers. Its time is less where the schedule recomputes what the
program does not read: the chain's B^ℓ asks for all of ā^ℓ, a^ℓ included, but the operators of B^ℓ
may not read a^ℓ; re-running the stage for its backward then stops before them ("early stop"). With
transfers the two times are close: the chain moves stages, the program their tensors, each with the
link's latency, and operators that run once do so in their own stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.models.steps import FORWARD_MOVES, ChainStep, Move, has_transfers
from memopt.models.variants import leanest, variant
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import with_frees
from memopt.programs.replay import replay
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.chain_to_graph import chain_to_graph
from memopt.reductions.stage_map import StagedGraph


def lower_steps(
    staged: StagedGraph, steps: Sequence[ChainStep], keep_unread: bool = False
) -> Program:
    """Lower a chain schedule to the program that runs it.

    A stage's first forward runs all its forward operators. Later ones run those that the output or
    the saved values need, without those whose results nothing reads. Values are freed after their
    last reader, never later than the schedule drops them, so drops lower to nothing. x_0 = a^0 is
    resident in a graph: moving it lowers to nothing, too.

    Args:
        graph: the graph the program is for, and its stages.
        steps: a schedule of `staged.chain`, with or without transfers.
        keep_unread: also re-run operators whose results nothing reads, so that the program's time
            is exactly the schedule's.

    Raises:
        InvalidProgramError: the schedule is not valid for the chain.
    """
    if has_transfers(steps):
        _check_with_transfers(staged.chain, steps)
    else:
        replay_chain(staged.chain, steps)
    instructions = _StageLowering(staged, steps).instructions()
    if not keep_unread:
        instructions = without_unread_reruns(staged.graph, instructions)
    completed = with_frees(staged.graph, instructions)
    runs = list(_leanest_runs(staged.graph, completed))
    if any(run.implementation is not None for run in runs):
        # These may read less, so that values die earlier.
        chosen = iter(runs)
        instructions = [next(chosen) if isinstance(one, Compute) else one for one in instructions]
        completed = with_frees(staged.graph, instructions)
    return Program(completed)


def _leanest_runs(graph: Graph, completed: Iterable[Instruction]) -> Iterator[Compute]:
    """Yield each run so that it writes no more than it keeps, as `stage_costs` prices it."""
    sizes = [tensor.size_bytes for tensor in graph.tensors]
    for one in completed:
        if isinstance(one, Compute):
            yield Compute(one.op, (), leanest(graph.operators[one.op], one.outputs, sizes))


def _check_with_transfers(chain: Chain, steps: Sequence[ChainStep]) -> None:
    view = chain_to_graph(chain)
    replay(view.graph, view.lower(steps))
    if ChainStep(Move.BACKWARD, 1) not in steps:
        raise InvalidProgramError("the schedule ends before B^1")


class _StageLowering:
    """Lowers one valid schedule; tracks which values the schedule holds, and where."""

    def __init__(self, staged: StagedGraph, steps: Sequence[ChainStep]) -> None:
        self.graph = staged.graph
        self.stages = staged.stages
        self.steps = steps
        self.begun: set[int] = set()
        self.activations: set[int] = set()
        self.moved: dict[int, tuple[int, ...]] = {}
        """The tensors with a host copy, by stage."""
        self.returned: set[int] = set()
        """Stages fetched again whose host copy is dropped after the next reader."""

    def instructions(self) -> list[Instruction]:
        """Return Computes, transfers and their frees, without other frees and outputs."""
        found: list[Instruction] = []
        for position, step in enumerate(self.steps):
            found.extend(self._step(position, step))
        return found

    def _step(self, position: int, step: ChainStep) -> Iterable[Instruction]:
        stage = step.stage
        if step.move in FORWARD_MOVES:
            return [*self._forward(step), *self._drop_host(stage - 1)]
        if step.move is Move.BACKWARD:
            self.activations.discard(stage - 1)
            dropped = [*self._drop_host(stage), *self._drop_host(stage - 1)]
            return [*self._backward(stage), *dropped]
        if step.move is Move.DROP_ACTIVATION:
            self.activations.discard(stage)
        elif step.move is Move.OFFLOAD:
            self.moved[stage] = self._needed_back(position, stage)
            return map(SwapOut, self.moved[stage])
        elif step.move is Move.RELEASE:
            return map(Free, self._without_own_output(stage))
        elif step.move is Move.PREFETCH:
            self.returned.add(stage)
            return map(SwapIn, self._without_own_output(stage))
        return ()

    def _forward(self, step: ChainStep) -> Iterable[Instruction]:
        stage = step.stage
        if step.move is not Move.FORWARD_ALL:
            self.activations.add(stage)
        if step.move is Move.FORWARD_NO_SAVE:
            self.activations.discard(stage - 1)
        if stage > len(self.stages):
            return ()
        operators = self.stages[stage - 1]
        chosen = operators.rerun if stage in self.begun else operators.forward
        self.begun.add(stage)
        return [Compute(i, ()) for i in chosen]

    def _backward(self, stage: int) -> Iterable[Instruction]:
        if stage <= len(self.stages):
            return [Compute(i, ()) for i in self.stages[stage - 1].backward]
        trains = self.graph.first_backward < len(self.graph.operators)
        return [LossBoundary()] if trains or self.graph.tangents else []

    def _needed_back(self, position: int, stage: int) -> tuple[int, ...]:
        """Return the tensors of x_ℓ that some step reads after x_ℓ has come back."""
        if not 1 <= stage <= len(self.stages):
            return ()
        back = ChainStep(Move.PREFETCH, stage)
        later = iter(self.steps[position:])
        needed: set[int] = set()
        for step in later:
            if step == back:
                needed.update(
                    *(self._reads(step) for step in later if step.stage - stage in (0, 1))
                )
                break
        return tuple(sorted(self.stages[stage - 1].saved & needed))

    def _reads(self, step: ChainStep) -> set[int]:
        """Return the tensors that the operators of a step read."""
        operators: Sequence[int] = ()
        if step.stage <= len(self.stages):
            if step.move in FORWARD_MOVES:
                operators = self.stages[step.stage - 1].forward
            elif step.move is Move.BACKWARD:
                operators = self.stages[step.stage - 1].backward
        return {t for i in operators for t in self.graph.operators[i].reads}

    def _without_own_output(self, stage: int) -> list[int]:
        """Return the moved tensors of x_ℓ that are not on the device as part of a^ℓ."""
        if stage not in self.activations:
            return list(self.moved[stage])
        return [t for t in self.moved[stage] if t != self.stages[stage - 1].output]

    def _drop_host(self, stage: int) -> list[Instruction]:
        if stage not in self.returned:
            return []
        self.returned.remove(stage)
        return list(map(DropHost, self.moved.pop(stage)))


def without_unread_reruns(graph: Graph, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Leave out the second and later runs of operators whose results nothing reads.

    A second run by another implementation stays if it gives a result of the step that the first one
    does not give (one gradient of a convolution)."""
    wanted: set[int] = set()
    """Positions of first runs, and of those that first give a result of the step."""
    ran: set[int] = set()
    missing = set(graph.kept)
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Compute):
            run = variant(graph.operators[instruction.op], instruction.implementation)
            new = not missing.isdisjoint(run.writes)
            if new or instruction.op not in ran:
                wanted.add(position)
            ran.add(instruction.op)
            if new:
                missing.difference_update(run.writes)
    read_later: set[int] = set()
    kept: list[Instruction] = []
    for position in range(len(instructions) - 1, -1, -1):
        instruction = instructions[position]
        if isinstance(instruction, Compute):
            run = variant(graph.operators[instruction.op], instruction.implementation)
            if position not in wanted and read_later.isdisjoint(run.writes):
                continue
            read_later.difference_update(run.writes)
            read_later.update(run.reads)
        else:
            effects = instruction.effects(graph)
            read_later.difference_update(effects.begins)
            read_later.update(effects.reads)
        kept.append(instruction)
    kept.reverse()
    return kept


def with_forward_again(graph: Graph, program: Program) -> Program:
    """Run a program's forward, as it stands, once more when its backward begins, so that only its
    inputs and the results of operators that cannot run twice are kept until then.

    Args:
        graph: the step.
        program: of it, with a backward; it moves and places nothing.
    """
    runs = [
        (position, Compute(one.op, (), one.implementation))
        for position, one in enumerate(program.instructions)
        if isinstance(one, Compute)
    ]
    boundary = program.boundary or 0
    forward = [one for position, one in runs if position < boundary]
    first = {one.op: one for one in reversed(forward)}
    once = [one for one in forward if first.pop(one.op, None) is not None]
    again = [one for one in forward if graph.operators[one.op].recomputable]
    order: list[Instruction] = [*once, LossBoundary(), *again]
    order += [one for position, one in runs if position > boundary]
    return Program(with_frees(graph, without_unread_reruns(graph, order)))
