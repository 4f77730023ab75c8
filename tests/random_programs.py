"""Seeded random valid programs and placements: orders, recomputations, swaps, offsets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

from memopt.models.graph import Graph, Implementation, Phase
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import computes, with_frees
from memopt.programs.placed import first_fit


def random_program(
    rng: Random,
    graph: Graph,
    *,
    recomputations: int = 0,
    swaps: int = 0,
    reorder: bool = False,
) -> Program:
    """A valid program: store-all with recomputations and swaps at random places.

    Args:
        rng: source of randomness.
        graph: the training step.
        recomputations: how many re-runs of recomputable operators to insert.
        swaps: how many tensors to swap out and in again, at most (a tensor needs two uses).
        reorder: draw a random topological order instead of the graph's own.
    """
    order = _random_order(rng, graph) if reorder else _own_order(graph)
    _recompute(rng, graph, order, recomputations)
    moved = [
        _any_implementation(rng, graph, one) if isinstance(one, Compute) else one
        for one in computes(graph, order)
    ]
    for _ in range(swaps):
        _swap(rng, graph, moved)
    return Program(with_frees(graph, moved))


def random_moves(rng: Random, graph: Graph, program: Program) -> Program:
    """The program with random movable tensors fetched before they are read and dropped after, or,
    where the step is repeated, left on the device by their updates."""
    for tensor in graph.movable:
        runs = [(i, graph.operators[x.op], x) for i, x in program.computes]
        reads = [
            (i, one.phase is Phase.UPDATE and not one.writes)
            for i, one, x in runs
            if tensor in x.effects(graph).reads
        ]
        hosted = [
            i for i, x in runs_on_host(graph, program) if tensor in graph.operators[x.op].reads
        ]
        last = hosted[0] if hosted else len(program)
        if (rng.random() < 0.3 and not hosted) or not reads:
            continue
        added: dict[int, list[Instruction]] = {}
        end, there = -1, False
        changed_last = [changes for _, changes in reads] == [False] * (len(reads) - 1) + [True]
        carried = graph.repeated and changed_last and not hosted and rng.random() < 0.6
        if carried:
            there = len(reads) > 1 and rng.random() < 0.5
            end = rng.randint(0, reads[0][0])
            added.setdefault(end, []).append(SwapOut(tensor))
            if not there:
                end = rng.randint(end, reads[0][0])
                added.setdefault(end, []).append(Free(tensor))
        for number, (position, changes) in enumerate(reads):
            if not there:
                begin = rng.randint(max(end, 0), position)
                added.setdefault(begin, []).append(SwapIn(tensor))
            later = [i for i, _ in reads[number + 1 :]][:1]
            out = end = rng.randint(position + 1, later[0] if later else last)
            if changes and carried:
                break
            if changes:
                out = rng.randint(position + 1, end)
                added.setdefault(out, []).append(SwapOut(tensor))
            # What begins on the device goes before its update.
            there = bool(later) and rng.random() < 0.4 and not (carried and number == 0)
            if not there:
                added.setdefault(end, []).append(Free(tensor))
        listed: list[Instruction] = []
        for position in range(len(program) + 1):
            listed += added.get(position, ())
            listed += program.instructions[position : position + 1]
        program = Program(listed)
    return program


def with_host_updates(rng: Random, graph: Graph) -> Graph:
    """The graph with some updates that the host may run, where it can."""
    operators = []
    for operator in graph.operators:
        there = [t for t in operator.reads if graph.tensors[t].resident]
        made = [t for t in operator.reads if t not in there]
        can = operator.changes_in_place and not operator.random and made
        can = can and set(there) <= set(graph.movable) and not graph.kept.intersection(made)
        if can and not set(made) & set(graph.tangents) and rng.random() < 0.8:
            time_s, scratch = rng.randint(0, 9), rng.randint(0, 9)
            choice = Implementation("host", time_s, scratch, (), (), on_host=True)
            operator = replace(operator, implementations=(*operator.implementations, choice))
        operators.append(operator)
    return replace(graph, operators=tuple(operators))


def random_host_updates(rng: Random, graph: Graph, program: Program) -> Program:
    """The program with random updates on the host, whose gradients are copied there. Before
    `random_moves`."""
    swapped = {x.tensor for x in program if isinstance(x, SwapOut)}
    listed: list[Instruction] = list(program)
    for _, run in program.computes:
        operator = graph.operators[run.op]
        made = [t for t in operator.reads if not graph.tensors[t].resident]
        can = any(one.on_host for one in operator.implementations)
        if not can or swapped.intersection(made) or rng.random() < 0.3:
            continue
        at = listed.index(run)
        listed[at : at + 1] = [*map(SwapOut, made), Compute(run.op, (), "host")]
        for tensor in made:
            listed.insert(rng.randint(at + 1 + len(made), len(listed)), DropHost(tensor))
        swapped.update(made)
    return Program(listed)


def runs_on_host(graph: Graph, program: Program) -> list[tuple[int, Compute]]:
    """Every Compute that the host runs, with its position."""
    found = []
    for position, run in program.computes:
        choices = graph.operators[run.op].implementations
        if any(one.on_host and one.name == run.implementation for one in choices):
            found.append((position, run))
    return found


def random_placement(rng: Random, graph: Graph, program: Program) -> Program:
    """The program with offsets: first fit, in a random order of its lifetimes."""
    listed = [
        lifetime
        for lifetime in sorted(lifetimes(graph, program).device, key=lambda one: one.end)
        if not lifetime.transient and lifetime.tensor not in graph.tangents
    ]
    rng.shuffle(listed)
    offsets: list[tuple[int, int, int]] = []
    placed: list[tuple[int, int, int, int]] = []
    for one in listed:
        size = graph.tensors[one.tensor].size_bytes
        together = (x[2:] for x in placed if one.begin < x[1] and x[0] < one.end)
        low = first_fit(together, size)
        placed.append((one.begin, one.end, low, low + size))
        offsets.append((one.begin, one.tensor, low))
    return Program(program.instructions, sorted(offsets))


def _own_order(graph: Graph) -> list[int | None]:
    order: list[int | None] = list(range(len(graph.operators)))
    if graph.first_backward < len(graph.operators) or graph.tangents:
        order.insert(graph.first_backward, None)
    return order


def _random_order(rng: Random, graph: Graph) -> list[int | None]:
    """A random topological order of operators and boundary. Forward operators that no output
    depends on may come after it, unless they are random. Random operators keep their order."""
    boundary = _own_order(graph).count(None) > 0
    needs: dict[int | None, set[int | None]] = {
        index: {graph.producer[tensor] for tensor in operator.reads if tensor in graph.producer}
        for index, operator in enumerate(graph.operators)
    }
    if boundary:
        needs[None] = {
            graph.producer[tensor]
            for tensor in graph.outputs
            if tensor in graph.producer and graph.producer[tensor] < graph.first_backward
        }
        for index, operator in enumerate(graph.operators):
            if operator.phase is not Phase.FORWARD:
                needs[index].add(None)
    for update, parameters in _updates(graph).items():
        for index, operator in enumerate(graph.operators):
            if parameters.intersection(operator.reads) and operator.phase is not Phase.UPDATE:
                needs[update].add(index)
    drawing = [index for index, operator in enumerate(graph.operators) if operator.random]
    for earlier, later in pairwise(drawing):
        needs[later].add(earlier)
    if boundary:
        needs[None].update(index for index in drawing if index < graph.first_backward)
    order: list[int | None] = []
    while needs:
        ready = [index for index, before in needs.items() if not before]
        chosen = rng.choice(ready)
        order.append(chosen)
        del needs[chosen]
        for before in needs.values():
            before.discard(chosen)
    return order


def _recompute(rng: Random, graph: Graph, order: list[int | None], count: int) -> None:
    candidates = [i for i, operator in enumerate(graph.operators) if operator.recomputable]
    for _ in range(count if candidates else 0):
        operator = rng.choice(candidates)
        lowest = order.index(operator) + 1
        reads = graph.operators[operator].reads
        changed = [i for i, parameters in _updates(graph).items() if parameters.intersection(reads)]
        highest = min([order.index(i) for i in changed], default=len(order))
        order.insert(rng.randint(lowest, highest), operator)


def _updates(graph: Graph) -> dict[int, frozenset[int]]:
    """Operators that change parameters in place → those parameters."""
    return {
        index: frozenset(operator.reads) & graph.resident
        for index, operator in enumerate(graph.operators)
        if operator.phase is Phase.UPDATE and not operator.writes
    }


def _any_implementation(rng: Random, graph: Graph, instruction: Compute) -> Compute:
    choices = graph.operators[instruction.op].implementations
    names = [choice.name for choice in choices if not choice.on_host]
    return Compute(instruction.op, (), rng.choice([None, *names]))


def _swap(rng: Random, graph: Graph, instructions: list[Instruction]) -> None:
    """Swap a random tensor out and in again between two of its uses, if it has two."""
    uses = [instruction.effects(graph) for instruction in instructions]
    swapped = {tensor for effects in uses for tensor in effects.host_begins}
    gaps: list[tuple[int, int, int]] = []
    latest: dict[int, int] = {}
    for position, effects in enumerate(uses):
        for tensor in effects.reads:
            if tensor not in swapped | graph.kept | graph.resident:
                gaps.append((tensor, latest[tensor], position))
                latest[tensor] = position
        for tensor in effects.writes:
            latest[tensor] = position
    if not gaps:
        return
    tensor, after, before = rng.choice(gaps)
    # Four cuts between the uses: out, free, in; and the host copy is dropped anywhere later.
    out, free, back = sorted(rng.randint(after + 1, before) for _ in range(3))
    drop = rng.randint(back, len(instructions))
    instructions.insert(drop, DropHost(tensor))
    instructions.insert(back, SwapIn(tensor))
    if rng.random() < 0.5:
        instructions.insert(free, Free(tensor))
    instructions.insert(out, SwapOut(tensor))
