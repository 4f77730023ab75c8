"""Brute forces for small instances, sharing nothing with the solvers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

from memopt.models.graph import Graph, Phase, TensorKind
from memopt.passes.order.tasks import Tasks, Value
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.olla import Buffer

FULL_SECTIONS = [
    (0, 1, 2), (0, 2, 2), (1, 3, 1), (2, 3, 1), (2, 4, 1), (1, 4, 1), (3, 5, 2), (0, 6, 2),
    (4, 6, 2), (5, 6, 1), (5, 6, 1),
]  # fmt: skip
"""(first instant, end, size) of buffers of which six bytes are live at every instant, and which
have no placement within six bytes."""


def is_order(tasks: Tasks, order: Sequence[int]) -> bool:
    """Whether `order` holds every task once, after its predecessors."""
    position = {task: i for i, task in enumerate(order)}
    return sorted(order) == [*range(len(tasks))] and all(
        position[other] < position[task]
        for task, earlier in enumerate(tasks.before)
        for other in earlier
    )


def all_orders(graph: Graph) -> Iterator[Program]:
    """Every valid program that runs each operator once, in every topological order."""
    steps: list[int | None] = [*range(len(graph.operators))]
    if graph.tangents or any(x.phase is not Phase.FORWARD for x in graph.operators):
        steps.append(None)

    def extend(chosen: list[int | None]) -> Iterator[list[int | None]]:
        if len(chosen) == len(steps):
            yield chosen
            return
        for step in steps:
            if step not in chosen and may_follow(graph, step, chosen):
                yield from extend([*chosen, step])

    for order in extend([]):
        listed: list[Instruction] = [
            LossBoundary() if step is None else Compute(step, ()) for step in order
        ]
        program = Program(with_frees(graph, listed))
        if validate(graph, program) is None:
            yield program


def may_follow(graph: Graph, step: int | None, done: Sequence[int | None]) -> bool:
    """Whether a step (None: the loss boundary) may come right after these."""
    written = set(graph.resident)
    for other in done:
        written |= set(graph.tangents if other is None else graph.operators[other].writes)
    if step is None:
        forward = [i for i, x in enumerate(graph.operators) if x.phase is Phase.FORWARD]
        if graph.tangents:
            return all(i in done for i in forward)
        return all(i in done for i in forward if set(graph.operators[i].writes) & {*graph.outputs})
    operator = graph.operators[step]
    if operator.phase is not Phase.FORWARD and None not in done:
        return False
    if operator.phase is Phase.FORWARD and graph.tangents and None in done:
        return False
    if operator.phase is Phase.UPDATE:
        mine = {t for t in operator.reads if graph.tensors[t].kind is TensorKind.PARAMETER}
        for i, other in enumerate(graph.operators):
            if i not in done and i < step and mine & set(other.reads):
                return False
    return written.issuperset(operator.reads)


def best_order_bytes(graph: Graph) -> int:
    """The least peak over all orders."""
    return min(replay(graph, program).peak_bytes for program in all_orders(graph))


def best_placement_bytes(buffers: Sequence[Buffer]) -> int:
    """The least peak over all placements: buffers sink in every order of placement."""
    best = sum(buffer.extent for buffer in buffers)
    for order in itertools.permutations(buffers):
        placed: list[tuple[Buffer, int]] = []
        for buffer in order:
            offset = max(
                (
                    low + other.extent
                    for other, low in placed
                    if other.lower < buffer.upper and buffer.lower < other.upper
                ),
                default=0,
            )
            step = buffer.alignment
            placed.append((buffer, -(-offset // step) * step))
        best = min(best, max(low + other.extent for other, low in placed))
    return best


def overlap(buffers: Sequence[Buffer], offsets: dict[str, int]) -> tuple[Buffer, Buffer] | None:
    """Two buffers that share an address at some time, or None."""
    for one, other in itertools.combinations(buffers, 2):
        if one.lower < other.upper and other.lower < one.upper:
            a, b = offsets[one.id], offsets[other.id]
            if a < b + other.size and b < a + one.size:
                return one, other
    return None


def filled_up(rng: Random) -> list[Buffer]:
    """Random buffers of few sections, the first that fit, until all sections are full."""
    sections, full = 6, 6
    room = [full] * sections
    lives: list[tuple[int, int, int]] = []
    while any(room):
        first = rng.choice([k for k, free in enumerate(room) if free])
        last = min(sections, first + rng.choice((1, 2, 2, 3, 4)))
        size = min(rng.randint(1, 3), room[first])
        while min(room[first:last]) < size:
            last -= 1
        lives.append((first, last, size))
        room[first:last] = [free - size for free in room[first:last]]
    return [Buffer(str(k), *life) for k, life in enumerate(lives)]


def random_tasks(rng: Random, count: int) -> Tasks:
    """A DAG that is no training step: wide, with transients, precedences and kept values."""
    values = []
    for producer in range(count):
        for _ in range(rng.choice([0, 1, 1, 2])):
            later = range(producer + 1, count)
            consumers = tuple(sorted(rng.sample(later, min(len(later), rng.randint(0, 3)))))
            kept = not consumers or rng.random() < 0.15
            values.append(Value(rng.randint(0, 12), producer, consumers, kept))
    after = [[rng.randrange(t)] if t and rng.random() < 0.2 else [] for t in range(count)]
    transient = [rng.choice([0, 0, rng.randint(1, 9)]) for _ in range(count)]
    return Tasks(tuple(transient), tuple(values), tuple(map(tuple, after)), rng.randint(0, 5))
