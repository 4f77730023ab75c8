"""Converts between programs and the ordering problem, keeping which instance each reader reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memopt.models.graph import Graph, Phase, TensorKind
from memopt.models.variants import variant
from memopt.passes.order.tasks import Tasks, Value
from memopt.programs.instructions import Compute, Free, Instruction, Program
from memopt.programs.lifetimes import Lifetime, lifetimes


@dataclass(frozen=True)
class ProgramTasks:
    """A program as an ordering problem.

    Attributes:
        graph: the program's graph.
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
        """Return the program in another order, each tensor freed after its last reader."""
        left = [len(value.consumers) for value in self.tasks.values]
        listed: list[Instruction] = []
        for task in order:
            instruction = self.instructions[task]
            listed.append(instruction)
            ended = instruction.effects(self.graph).ends
            for index in self.tasks.consumed[task]:
                left[index] -= 1
                value, tensor = self.tasks.values[index], self.tensors[index]
                if left[index] == 0 and not value.kept and tensor not in ended:
                    listed.append(Free(tensor))
            listed.extend(Free(tensor) for tensor in self.unread[task])
        return Program(listed)


def tasks_of(graph: Graph, program: Program) -> ProgramTasks:
    """Make the ordering problem of a valid program, its own order first.

    Each reader keeps its instance of a tensor: the next lifetime of a recomputed or reloaded tensor
    begins after the last reader of the one before. In-place outputs stay in place, after every
    other reader of the tensor they overwrite. Where the loss is the user's (the graph has tangents)
    nothing crosses the loss boundary. Updates follow every reader of their parameters. Random
    operators share one generator: first runs keep their order, and later runs follow the first
    runs, which draw. Transfers stay between the same two computations, so that they overlap with
    the same ones, and keep their order on the links.
    """
    return _Reader(graph, program).result()


def in_any_place(problem: ProgramTasks) -> ProgramTasks:
    """Return the ordering problem of a program without in-place outputs in which every operator
    takes over the storage of a tensor that it may overwrite, if some order lets it. Its optimum is
    a bound for every order and every choice of in-place outputs."""
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
    """Reads tasks, values and precedences from a program, one kind after the other."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self.graph = graph
        self.lifetimes = lifetimes(graph, program).device
        frees = {lifetime.end for lifetime in self.lifetimes if lifetime.freed}
        waiting = {lifetime.end for lifetime in self.lifetimes if lifetime.copied}
        listed = [i for i in range(len(program)) if i not in frees or i in waiting]
        self.instructions = [program.instructions[position] for position in listed]
        self.task_at = {position: task for task, position in enumerate(listed)}
        self.boundary = None if program.boundary is None else self.task_at[program.boundary]
        self.computes = [
            (self.task_at[position], run, graph.operators[run.op])
            for position, run in program.computes
        ]
        """(task, instruction, its operator) of every Compute."""
        self.transient = [x.effects(graph).workspace_bytes for x in self.instructions]
        self.unread: list[list[int]] = [[] for _ in listed]
        self.after: list[set[int]] = [set() for _ in listed]

    def result(self) -> ProgramTasks:
        """Return the ordering problem."""
        values = self._values()
        self._lifetime_order()
        self._update_order()
        self._boundary_order(self._draw_order())
        sent = [task for task, _, operator in self.computes if operator.collective is not None]
        for task, later in pairwise(sent):
            self.after[later].add(task)
        self._move_order()
        tasks = Tasks(
            tuple(self.transient),
            tuple(value for _, _, value in values),
            tuple(tuple(sorted(earlier)) for earlier in self.after),
            self.graph.resident_bytes,
        )
        return ProgramTasks(
            self.graph,
            tasks,
            tuple(self.instructions),
            tuple(tensor for _, tensor, _ in values),
            tuple(tuple(sorted(tensors)) for tensors in self.unread),
        )

    def _readers(self, lifetime: Lifetime) -> set[int]:
        """Return the tasks that need a lifetime: readers, and a Free that waits for its copy."""
        readers = {self.task_at[position] for position in lifetime.readers}
        if lifetime.copied and not lifetime.overwritten and lifetime.end in self.task_at:
            readers.add(self.task_at[lifetime.end])
        return readers

    def _values(self) -> list[tuple[int, int, Value]]:
        """Return (producer, tensor, value) of lifetimes, sorted; unread lifetimes are transient."""
        found: list[tuple[int, int, Value]] = []
        for lifetime in self.lifetimes:
            size = self.graph.tensors[lifetime.tensor].size_bytes
            producer, readers = self.task_at[lifetime.begin], self._readers(lifetime)
            if lifetime.overwritten:
                self.transient[self.task_at[lifetime.end]] -= size
            if readers or lifetime.stays:
                value = Value(size, producer, tuple(sorted(readers)), lifetime.stays)
                found.append((producer, lifetime.tensor, value))
                continue
            self.transient[producer] += size
            if not lifetime.transient:
                self.unread[producer].append(lifetime.tensor)
        return sorted(found, key=lambda entry: entry[:2])

    def _lifetime_order(self) -> None:
        """Order tasks by lifetimes: a tensor's next lifetime begins after the last reader of the
        one before; a Free that waits for a copy, and an operator that takes over a storage, follow
        the readers of what they end."""
        last: dict[int, Lifetime] = {}
        for lifetime in self.lifetimes:
            if lifetime.transient:
                continue
            begin, end = self.task_at[lifetime.begin], self.task_at.get(lifetime.end)
            before = last.get(lifetime.tensor)
            if before is not None:
                self.after[begin] |= {self.task_at[before.begin], *self._readers(before)}
            last[lifetime.tensor] = lifetime
            if end is not None:
                self.after[end] |= self._readers(lifetime) - {end}

    def _update_order(self) -> None:
        """Order updates after every earlier reader of the tensors they read."""
        readers: dict[int, list[int]] = {}
        for task, instruction, operator in self.computes:
            chosen = variant(operator, instruction.implementation)
            if operator.phase is Phase.UPDATE:
                for tensor in chosen.reads:
                    self.after[task].update(readers.get(tensor, ()))
            for tensor in chosen.reads:
                if self.graph.tensors[tensor].kind is TensorKind.PARAMETER:
                    readers.setdefault(tensor, []).append(task)

    def _draw_order(self) -> set[int]:
        """Order first runs of random operators one after the other, and later runs after their
        first; return the first runs."""
        first: dict[int, int] = {}
        for task, instruction, operator in self.computes:
            if not operator.random:
                continue
            if instruction.op in first:
                self.after[task].add(first[instruction.op])
                continue
            self.after[task] |= {max(first.values())} if first else set()
            first[instruction.op] = task
        return set(first.values())

    def _move_order(self) -> None:
        """Keep transfers, frees after them and drops of host copies in order, between the Computes
        before and behind them."""
        compute = move = None
        waiting: set[int] = set()
        runs = {task for task, _, _ in self.computes}
        for task in range(len(self.instructions)):
            if task == self.boundary:
                continue
            if task in runs:
                self.after[task] |= waiting
                waiting = set()
                compute = task
                continue
            self.after[task] |= {other for other in (compute, move) if other is not None}
            waiting.add(task)
            move = task

    def _boundary_order(self, first_draws: set[int]) -> None:
        """Separate the instructions before the loss boundary from those after it."""
        boundary = self.boundary
        if boundary is None:
            return
        if self.graph.tangents:
            self.after[boundary].update(range(boundary))
            for task in range(boundary + 1, len(self.instructions)):
                self.after[task].add(boundary)
            return
        outputs = set(self.graph.outputs)
        for task, instruction, operator in self.computes:
            if operator.phase is not Phase.FORWARD:
                self.after[task].add(boundary)
            elif task < boundary and (
                task in first_draws or outputs.intersection(instruction.outputs)
            ):
                self.after[boundary].add(task)
