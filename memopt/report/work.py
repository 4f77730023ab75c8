"""The work of a plan beyond the model's own step, by module: operators run again, tensors moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.graph import Graph
from memopt.models.steps import ChainStep, Move
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.report.modules import depth_for, group_of


@dataclass(frozen=True, slots=True)
class Extra:
    """Operators that run again in one module, or tensors of it that move.

    Attributes:
        module: path of the user's module, cut to a common depth.
        count: operators that run again, or tensors that move.
        time_s: of the re-runs, seconds.
        size_bytes: of the tensors that move.
    """

    module: str
    count: int
    time_s: float = 0.0
    size_bytes: int = 0


def recomputed(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Extra, ...]:
    """Operators that run again, by module, in the order of the model."""
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
class Gathered:
    """The sharded parameters of one module.

    Attributes:
        module: path of the user's module, cut to a common depth.
        count: parameters of it that are gathered.
        again: of these those that are gathered more than once; the others are kept.
    """

    module: str
    count: int
    again: int


def gathered(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Gathered, ...]:
    """What is gathered of sharded parameters, by module, in the order of the model."""
    calls = {i: one for i, one in enumerate(graph.operators) if _GATHER in one.target}
    depth = depth_for((operator.module for operator in calls.values()), most_groups)
    runs = Counter(run.op for _, run in program.computes)
    count: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for op, operator in calls.items():
        group = group_of(operator.module, depth)
        count[group] += 1
        again[group] += runs[op] > 1
    return tuple(Gathered(name, number, again[name]) for name, number in count.items())


_GATHER = "all_gather_into_tensor"


def moved(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Extra, ...]:
    """What is copied to the host, by the module that computes it."""
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
    """(first stage, last stage, how often their forward runs), neighbours with equal counts as
    one."""
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
    """The stages whose saved values go to the host, ascending."""
    return tuple(sorted({step.stage for step in steps if step.move is Move.OFFLOAD}))
