"""A plan's work beyond the model's own step, by module: recomputed operators, moved tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.collective import CollectiveKind
from memopt.models.graph import Graph
from memopt.models.steps import ChainStep, Move
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.report.module_rows import depth_for, group_of


@dataclass(frozen=True, slots=True)
class Extra:
    """Recomputations in one module, or tensors of it that move.

    Attributes:
        module: path of the user's module, cut to a common depth.
        count: how many recomputations, or moves of tensors.
        time_s: of the recomputations, seconds.
        size_bytes: of the moved tensors.
    """

    module: str
    count: int
    time_s: float = 0.0
    size_bytes: int = 0


def recomputed(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Extra, ...]:
    """List the recomputations by module, in the order of the model."""
    depth = depth_for((operator.module for operator in graph.operators), most_groups)
    ran: set[int] = set()
    count: Counter[str] = Counter()
    time_s: defaultdict[str, float] = defaultdict(float)
    for _, instruction in program.computes:
        operator = graph.operators[instruction.op]
        if instruction.op in ran:
            group = group_of(operator.module, depth)
            count[group] += 1
            time_s[group] += variant(operator, instruction.implementation).time_s
        ran.add(instruction.op)
    order = dict.fromkeys(group_of(operator.module, depth) for operator in graph.operators)
    return tuple(Extra(name, count[name], time_s[name]) for name in order if count[name])


@dataclass(frozen=True, slots=True)
class Gathers:
    """The all-gathers of one module.

    Attributes:
        module: path of the user's module, cut to a common depth.
        kept: how many run once, so that their results stay until their last reader.
        again: how many run again (reshard_after_forward, as FSDP calls it).
        time_s: of the repeated runs on the network, seconds.
    """

    module: str
    kept: int
    again: int
    time_s: float


def gathered(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Gathers, ...]:
    """Count the all-gathers that run once and those that run again, by module in model order."""
    gathers = [
        index
        for index, operator in enumerate(graph.operators)
        if operator.collective and operator.collective.kind is CollectiveKind.ALL_GATHER
    ]
    depth = depth_for((graph.operators[index].module for index in gathers), most_groups)
    runs = Counter(run.op for _, run in program.computes)
    rows: dict[str, list[int]] = {}
    for index in gathers:
        rows.setdefault(group_of(graph.operators[index].module, depth), []).append(index)
    return tuple(
        Gathers(
            module,
            sum(runs[index] == 1 for index in found),
            sum(runs[index] > 1 for index in found),
            sum((runs[index] - 1) * graph.operators[index].time_s for index in found),
        )
        for module, found in rows.items()
    )


def moved(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Extra, ...]:
    """List the tensors that are copied to the host, by the module that computes them."""
    tensors = [tensor for one in program for tensor in one.effects(graph).host_begins]
    paths = {t: _module(graph, t) for t in tensors}
    depth = depth_for(paths.values(), most_groups)
    count: Counter[str] = Counter()
    size_bytes: Counter[str] = Counter()
    for tensor in tensors:
        group = group_of(paths[tensor], depth)
        count[group] += 1
        size_bytes[group] += graph.tensors[tensor].size_bytes
    return tuple(Extra(name, n, size_bytes=size_bytes[name]) for name, n in count.items())


def _module(graph: Graph, tensor: int) -> str:
    producer = graph.producer.get(tensor)
    return "" if producer is None else graph.operators[producer].module


def stage_runs(steps: Iterable[ChainStep]) -> tuple[tuple[int, int, int], ...]:
    """List (first stage, last stage, how often their forward runs); neighbours with equal counts
    are one entry."""
    forward = (Move.FORWARD_NO_SAVE, Move.FORWARD_CHECKPOINT, Move.FORWARD_ALL)
    runs = Counter(step.stage for step in steps if step.move in forward)
    ranges: list[tuple[int, int, int]] = []
    for stage in sorted(runs):
        if ranges and ranges[-1][2] == runs[stage] and ranges[-1][1] == stage - 1:
            ranges[-1] = (ranges[-1][0], stage, runs[stage])
        else:
            ranges.append((stage, stage, runs[stage]))
    return tuple(ranges)


def offloaded_stages(steps: Iterable[ChainStep]) -> tuple[int, ...]:
    """Return the stages whose saved values go to the host, ascending."""
    return tuple(sorted({step.stage for step in steps if step.move is Move.OFFLOAD}))
