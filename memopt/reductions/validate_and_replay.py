"""The final check of every plan: validate it, then replay it under the common semantics."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.models.budget import Budget
from memopt.models.codec import NAME
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.last_of import LastOf
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.programs.violations import Violation


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a replayed plan. Bytes are totals, resident included. A placed program's peak
    is its arena plus the largest memory outside it, since the arena is one allocation."""

    peak_bytes: int
    time_s: float = field(metadata={NAME: "step_time_s"})
    host_peak_bytes: int


_CHECKED = LastOf[tuple[Violation | None, Figures]]()


def validate_and_replay(
    graph: Graph, program: Program, budget: Budget, device: Device | None
) -> tuple[Violation | None, Figures]:
    """Validate and replay a plan's program, within its budget.

    Raises:
        InvalidProgramError: it cannot be replayed (the validator's verdict comes first).
    """
    return _CHECKED.of(
        (graph, program), (budget, device), lambda: _checked(graph, program, budget, device)
    )


def _checked(
    graph: Graph, program: Program, budget: Budget, device: Device | None
) -> tuple[Violation | None, Figures]:
    violation = validate(graph, program, budget)
    if violation is not None:
        return violation, Figures(0, 0.0, 0)
    timeline = replay(graph, program, device)
    placed_bytes = timeline.placed_peak_bytes
    peak_bytes = timeline.peak_bytes if placed_bytes is None else placed_bytes
    return None, Figures(peak_bytes, timeline.time_s, timeline.host_peak_bytes)
