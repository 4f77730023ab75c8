"""Store-all: the framework's own order, nothing recomputed. Every other strategy's yardstick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.models.steps import ChainStep, Move
from memopt.programs.in_place import with_in_place
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.base import CostModel, Progress, Strategy


@dataclass(frozen=True)
class StoreAll(Strategy):
    """Recomputes and moves nothing: the step as it is, every tensor freed after its last use.

    Every operator once, in the framework's order, in place where it may be."""

    name: ClassVar[str] = "store-all"
    needs: ClassVar[str] = "any"

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        if isinstance(cost_model, Graph):
            program = with_in_place(cost_model, store_all(cost_model))
            timeline = replay(cost_model, program, device)
            solution = _solution(timeline.peak_bytes, timeline.time_s, program=program)
        else:
            steps = chain_steps(cost_model)
            chain_timeline = replay_chain(cost_model, steps)
            solution = _solution(chain_timeline.peak_bytes, chain_timeline.time_s, steps=steps)
        peak_bytes = solution.peak_bytes
        if budget_bytes is not None and peak_bytes is not None and peak_bytes > budget_bytes:
            return Solution(Status.INFEASIBLE, smallest_budget_bytes=peak_bytes, smallest=solution)
        return solution


def chain_steps(chain: Chain) -> tuple[ChainStep, ...]:
    """Return F_all of every stage, then every backward."""
    forward = [ChainStep(Move.FORWARD_ALL, k) for k in range(1, len(chain) + 1)]
    return (*forward, *(ChainStep(Move.BACKWARD, k) for k in range(len(chain), 0, -1)))


def store_all_bytes(chain: Chain) -> int:
    """Return the bytes of the chain without recomputation, beyond resident bytes and a^0."""
    peak_bytes = replay_chain(chain, chain_steps(chain)).peak_bytes
    return peak_bytes - chain.resident_bytes - chain.input_bytes


def _solution(peak_bytes: int, time_s: float, **plan: object) -> Solution:
    return Solution(
        Status.OPTIMAL,
        peak_bytes=peak_bytes,
        time_s=time_s,
        lower_bound_s=time_s,
        gap=0.0,
        **plan,  # type: ignore[arg-type]  # steps= or program=
    )
