"""The last word on a plan, whoever made it: validated, then replayed under the one semantics."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.codec import NAME
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.steps import ChainStep, has_transfers
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.programs.violations import Violation, ViolationCode
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.offload_replay import replay_offload
from memopt.reductions.validate_chain import validate_chain
from memopt.reductions.validate_offload import validate_offload


@dataclass(frozen=True, slots=True)
class Figures:
    """What replaying a plan gives: bytes are totals, resident included. A placed program's peak is
    its arena and the most that lies outside it, since the arena is one allocation."""

    peak_bytes: int
    time_s: float = field(metadata={NAME: "step_time_s"})
    host_peak_bytes: int


def validate_and_replay(
    cost_model: Chain | Graph,
    steps: tuple[ChainStep, ...] | None,
    program: Program | None,
    budget: Budget,
    device: Device | None,
    *,
    offloading: bool = False,
) -> tuple[Violation | None, Figures]:
    """Validate and replay a plan, within what it may take on the device and on the host: the
    program of a Graph, or the schedule of a bare Chain.

    Args:
        cost_model: what the plan is for.
        steps: the schedule of a bare Chain.
        program: the program of a Graph.
        budget: on the device and on the host.
        device: link rates; None: transfers take no time.
        offloading: whether its strategy may offload. The offloading model of a bare Chain has no
            gradient of the loss before its backward; an offloader's schedule is judged by it also
            where nothing has to move.

    Raises:
        InvalidProgramError: it cannot be replayed (the validator's verdict comes first).
    """
    if isinstance(cost_model, Graph):
        assert program is not None
        violation = validate(cost_model, program, budget)
        if violation is not None:
            return violation, Figures(0, 0.0, 0)
        timeline = replay(cost_model, program, device)
        placed_bytes = timeline.placed_peak_bytes
        peak_bytes = timeline.peak_bytes if placed_bytes is None else placed_bytes
        return None, Figures(peak_bytes, timeline.time_s, timeline.host_peak_bytes)
    assert steps is not None
    moves = has_transfers(steps)
    violation = None if moves else validate_chain(cost_model, steps, budget.device_bytes)
    over = violation is not None and violation.code is ViolationCode.OVER_BUDGET
    if moves or (offloading and over):
        moves = True
        violation = validate_offload(cost_model, steps, budget)
    if violation is not None:
        return violation, Figures(0, 0.0, 0)
    if moves:
        moved = replay_offload(cost_model, steps, device)
        return None, Figures(moved.peak_bytes, moved.time_s, moved.host_peak_bytes)
    chain_timeline = replay_chain(cost_model, steps)
    return None, Figures(chain_timeline.peak_bytes, chain_timeline.time_s, 0)
