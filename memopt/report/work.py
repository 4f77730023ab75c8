"""The work of a plan beyond the model's own step, by module: operators run again, tensors moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.graph import Graph
from memopt.models.steps import ChainStep, Move
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Program, SwapOut
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
    paths = [operator.module for operator in graph.operators]
    again: list[Extra] = []
    ran: set[int] = set()
    for instruction in program:
        if isinstance(instruction, Compute):
            operator = graph.operators[instruction.op]
            if instruction.op in ran:
                time_s = variant(operator, instruction.implementation).time_s
                again.append(Extra(operator.module, 1, time_s))
            ran.add(instruction.op)
    return _by_module(again, paths, most_groups)


def moved(graph: Graph, program: Program, most_groups: int = 12) -> tuple[Extra, ...]:
    """Tensors that are copied to the host, by the module that computes them."""
    tensors = [i.tensor for i in program if isinstance(i, SwapOut)]
    copies = [Extra(_module(graph, t), 1, 0.0, graph.tensors[t].size_bytes) for t in tensors]
    return _by_module(copies, [copy.module for copy in copies], most_groups)


def _by_module(entries: list[Extra], paths: list[str], most_groups: int) -> tuple[Extra, ...]:
    """Sums over modules, cut to a depth with at most so many groups, in the order of the paths."""
    depth = depth_for(paths, most_groups)
    sums = {group_of(path, depth): Extra(group_of(path, depth), 0) for path in paths}
    for one in entries:
        name = group_of(one.module, depth)
        known = sums[name]
        sums[name] = Extra(
            name,
            known.count + one.count,
            known.time_s + one.time_s,
            known.size_bytes + one.size_bytes,
        )
    return tuple(found for found in sums.values() if found.count)


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
