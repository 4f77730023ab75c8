"""Programs within larger budgets, which the mover makes fit by transfers."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.solvers.running import Deadline
from memopt.strategies.shared.chain_programs import programs_of_chain, programs_of_stages
from memopt.strategies.shared.graph_model import Allowed

BUDGETS, SWEPT = 10, 32
"""Larger budgets for recomputation by rotor and by stages."""


def rotor_programs_above(
    graph: Graph, whole: Program, limit_bytes: int, until: Deadline
) -> Iterator[Program]:
    """Yield rotor's programs within a limit and within larger budgets, up to what storing
    everything takes; `whole` does that."""
    more_bytes = replay(graph, whole).peak_bytes - limit_bytes
    budgets = [limit_bytes + part * more_bytes // BUDGETS for part in range(BUDGETS)]
    yield from programs_of_chain(graph, budgets, until)


def stage_programs_above(
    graph: Graph, whole: Program, limit_bytes: int, link: Device | None, until: Deadline,
    allowed: Allowed,
) -> Iterator[Program]:  # fmt: skip
    """Yield rotor-menus' programs within a limit, and larger budgets as far as the link could take
    the difference; None: nothing moves."""
    timeline = replay(graph, whole)
    # It cannot take more during a step of twice the time; it may be infinitely fast.
    moved = 0.0 if link is None else 2 * timeline.time_s * link.to_host_bytes_per_s
    most_bytes = int(min(limit_bytes + moved, timeline.peak_bytes))
    yield from programs_of_stages(graph, most_bytes, SWEPT, until, allowed)
