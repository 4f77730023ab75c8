"""From a strategy's solution to the program that runs: reorder and place it if the user asks for
that, lower it to the graph, let operators run in place, start collectives early; then validate and
replay it. Each is done once."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.errors import InvalidProgramError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.options import PassOptions
from memopt.models.stage_record import StageRecord
from memopt.programs.instructions import Program
from memopt.reductions.validate_and_replay import Figures
from memopt.strategies import Solution
from memopt.strategies.target import Target


@dataclass(frozen=True)
class FinishedProgram:
    """A solution's program, ready to run."""

    solution: Solution
    program: Program
    figures: Figures
    passes: tuple[StageRecord, ...]


def finish(
    target: Target,
    solution: Solution,
    budget: Budget,
    device: Device,
    passes: PassOptions,
    time_limit_s: float | None,
) -> FinishedProgram | Solution:
    """Make the program that runs from a strategy's solution.

    Returns:
        The program; or a solution without a plan, if no program is within the budget.

    Raises:
        InvalidProgramError: the strategy, or a pass, made a program that is not valid.
    """
    asked = {"order": passes.order, "place": passes.place}
    if passes.order or passes.place:
        from memopt.passes.order_and_place import ordered_and_placed

        lower = target.view.lower if target.view is not None else None
        solution = ordered_and_placed(
            target.graph, solution, lower, budget, device, asked, time_limit_s
        )
    if not solution.plans:
        return solution
    program = target.program(solution, budget.device_bytes, device)
    assert program is not None
    violation, figures = target.check(program, budget, device)
    if violation is not None:
        raise InvalidProgramError(f"{target.strategy.name} made an invalid plan: {violation}")
    ran = tuple(StageRecord(name) for name, wanted in asked.items() if wanted)
    return FinishedProgram(solution, program, figures, ran)
