"""Between programs and the ordering problem: which instance of a tensor feeds which reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt.models.graph import Graph, Phase, TensorKind
from memopt.models.variants import variant
from memopt.programs.instructions import (
    Compute,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.strategies.olla.tasks import Tasks, Value


@dataclass
class _Life:
    """A lifetime while the program is read."""

    tensor: int
    producer: int
    readers: list[int]
    moved: bool = False


@dataclass(frozen=True)
class ProgramTasks:
    """A program as an ordering problem.

    Attributes:
        graph: what the program is for.
        tasks: one task per instruction, frees left out (a free is a task only where it ends a
            lifetime that is copied to the host, since it waits for the copy).
        instructions: the instruction of each task.
        tensors: the tensor of each value.
        unread: for each task, tensors it makes that are freed at once; transient in `tasks`.
    """

    graph: Graph
    tasks: Tasks
    instructions: tuple[Instruction, ...]
    tensors: tuple[int, ...]
    unread: tuple[tuple[int, ...], ...]

    def program(self, order: Sequence[int]) -> Program:
        """The program in another order: each tensor freed after its last reader."""
        left = [len(value.consumers) for value in self.tasks.values]
        listed: list[Instruction] = []
        for task in order:
            instruction = self.instructions[task]
            listed.append(instruction)
            ended = instruction.in_place if isinstance(instruction, Compute) else None
            for index in self.tasks.consumed[task]:
                left[index] -= 1
                value, tensor = self.tasks.values[index], self.tensors[index]
                ends = left[index] == 0 and not value.kept and tensor != ended
                if ends and not isinstance(instruction, Free):
                    listed.append(Free(tensor))
            listed.extend(Free(tensor) for tensor in self.unread[task])
        return Program(listed)


def tasks_of(graph: Graph, program: Program) -> ProgramTasks:
    """The ordering problem of a valid program, its own order first.

    Orders keep what each instance of a tensor feeds: a re-computed or re-loaded tensor's next
    lifetime begins after the last reader of the one before. What is computed in place stays so,
    after every other reader of what it overwrites. Where the loss is the user's (the graph has
    tangents) nothing crosses the loss boundary. Updates follow every reader of their parameters.
    Random operators, which share one generator, first run in the order they have; their later runs
    follow their first, which draws for all of them.
    Transfers stay between the two computations they are between, so that what they
    overlap with stays the same, in their order on the links.
    """
    return _Reader(graph, program).result()


def in_any_place(problem: ProgramTasks) -> ProgramTasks:
    """The problem of a program that computes nothing in place, as if every operator took over
    the storage of a tensor that it may overwrite wherever some order lets it: its optimum is a
    bound for every order and every choice of what is computed in place."""
    graph, tasks = problem.graph, problem.tasks
    transient = list(tasks.transient)
    for task, instruction in enumerate(problem.instructions):
        if not isinstance(instruction, Compute):
            continue
        chosen = variant(graph.operators[instruction.op], instruction.implementation)
        later = tasks.descendants[task]
        for index in tasks.consumed[task]:
            value = tasks.values[index]
            last = not value.kept and not any(later >> other & 1 for other in value.consumers)
            if last and problem.tensors[index] in chosen.in_place:
                transient[task] -= value.size
                break
    return replace(problem, tasks=replace(tasks, transient=tuple(transient)))


class _Reader:
    def __init__(self, graph: Graph, program: Program) -> None:
        self.graph = graph
        self.tasks: list[Instruction] = []
        self.transient: list[int] = []
        self.after: list[set[int]] = []
        self.open: dict[int, _Life] = {}
        self.closed: list[_Life] = []
        self.last: dict[int, _Life] = {}
        self.previous_compute: int | None = None
        self.previous_move: int | None = None
        self.waiting_moves: list[int] = []
        self.boundary: int | None = None
        self.parameter_readers: dict[int, list[int]] = {}
        self.first_draws: dict[int, int] = {}
        """Random operator → the task of its first run, in order."""
        for instruction in program:
            self._add(instruction)
        self._boundary_order()

    def _add(self, instruction: Instruction) -> None:
        if isinstance(instruction, Free):
            life = self.open.pop(instruction.tensor)
            self.closed.append(life)
            if not life.moved:
                return
        task = len(self.tasks)
        self.tasks.append(instruction)
        self.transient.append(0)
        self.after.append(set())
        if isinstance(instruction, Compute):
            self._compute(task, instruction)
        elif isinstance(instruction, LossBoundary):
            self.boundary = task
            self.transient[task] = self.graph.boundary_bytes
            for tensor in self.graph.tangents:
                self._begin(task, tensor)
        else:
            self._move(task, instruction)

    def _compute(self, task: int, instruction: Compute) -> None:
        operator = self.graph.operators[instruction.op]
        chosen = variant(operator, instruction.implementation)
        for tensor in dict.fromkeys(chosen.reads):
            if tensor in self.open:
                self.open[tensor].readers.append(task)
            if self.graph.tensors[tensor].kind is TensorKind.PARAMETER:
                self.parameter_readers.setdefault(tensor, []).append(task)
        for tensor in chosen.writes:
            if tensor in instruction.outputs:
                self._begin(task, tensor)
            else:
                self.transient[task] += self.graph.tensors[tensor].size_bytes
        self.transient[task] += chosen.workspace_bytes
        if instruction.in_place is not None:
            taken = self.open.pop(instruction.in_place)
            self.closed.append(taken)
            self.after[task].update(other for other in taken.readers if other != task)
            self.transient[task] -= self.graph.tensors[taken.tensor].size_bytes
        if operator.phase is Phase.UPDATE:
            for tensor in chosen.reads:
                earlier = self.parameter_readers.get(tensor, ())
                self.after[task].update(other for other in earlier if other != task)
        if operator.random:
            self._draw(task, instruction.op)
        for move in self.waiting_moves:
            self.after[task].add(move)
        self.waiting_moves.clear()
        self.previous_compute = task

    def _draw(self, task: int, op: int) -> None:
        if op in self.first_draws:
            self.after[task].add(self.first_draws[op])
            return
        if self.first_draws:
            self.after[task].add(max(self.first_draws.values()))
        self.first_draws[op] = task

    def _move(self, task: int, instruction: Instruction) -> None:
        """A transfer, the free after one, or the drop of a host copy."""
        if isinstance(instruction, SwapIn):
            self._begin(task, instruction.tensor)
        elif isinstance(instruction, SwapOut):
            self.open[instruction.tensor].readers.append(task)
            self.open[instruction.tensor].moved = True
        elif isinstance(instruction, Free):
            life = self.closed[-1]
            self.after[task].update(life.readers)
            life.readers.append(task)
        if self.previous_compute is not None:
            self.after[task].add(self.previous_compute)
        if self.previous_move is not None:
            self.after[task].add(self.previous_move)
        self.previous_move = task
        self.waiting_moves.append(task)

    def _begin(self, task: int, tensor: int) -> None:
        before = self.last.get(tensor)
        if before is not None:
            self.after[task].update((before.producer, *before.readers))
        life = _Life(tensor, task, [])
        self.open[tensor] = self.last[tensor] = life

    def _boundary_order(self) -> None:
        """What comes before the loss boundary and what after."""
        if self.boundary is None:
            return
        outputs = set(self.graph.outputs)
        for task, instruction in enumerate(self.tasks):
            if task == self.boundary:
                continue
            if self.graph.tangents:
                self._fix_side(task)
            elif isinstance(instruction, Compute):
                forward = self.graph.operators[instruction.op].phase is Phase.FORWARD
                if not forward:
                    self.after[task].add(self.boundary)
                elif task < self.boundary and (
                    task in self.first_draws.values() or outputs.intersection(instruction.outputs)
                ):
                    self.after[self.boundary].add(task)

    def _fix_side(self, task: int) -> None:
        assert self.boundary is not None
        if task < self.boundary:
            self.after[self.boundary].add(task)
        else:
            self.after[task].add(self.boundary)

    def result(self) -> ProgramTasks:
        unread: list[list[int]] = [[] for _ in self.tasks]
        lives = [life for life in self.closed if life.readers]
        for life in self.closed:
            if not life.readers:
                unread[life.producer].append(life.tensor)
                self.transient[life.producer] += self.graph.tensors[life.tensor].size_bytes
        lives += self.open.values()
        lives.sort(key=lambda life: (life.producer, life.tensor))
        values = tuple(
            Value(
                self.graph.tensors[life.tensor].size_bytes,
                life.producer,
                tuple(sorted(set(life.readers))),
                self.open.get(life.tensor) is life,
            )
            for life in lives
        )
        tasks = Tasks(
            tuple(self.transient),
            values,
            tuple(tuple(sorted(earlier)) for earlier in self.after),
            self.graph.resident_bytes,
        )
        return ProgramTasks(
            self.graph,
            tasks,
            tuple(self.tasks),
            tuple(life.tensor for life in lives),
            tuple(tuple(sorted(tensors)) for tensors in unread),
        )
