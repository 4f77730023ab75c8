"""Turns a set of offloads into chain steps that keep the budget at instruction boundaries.

An OFFLOAD follows the step that makes its data; the copies queue on the link. Where a step needs
room, the oldest copies are RELEASEd just before it: no later point keeps the budget, and a later
point never waits longer. A PREFETCH takes its memory from its boundary on, so it may come only
where every later step up to its reader still fits. Coming early keeps the link busy; but the room
it takes may make the next step wait for copies to the host that are still in progress. `patience`
says how much waiting is accepted for how much idle link; a few values are tried, and the replay
chooses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memopt.models.steps import ChainStep, Move
from memopt.programs.link_clock import LinkClock
from memopt.programs.replay import Timeline, replay
from memopt.reductions.chain_to_graph import chain_to_graph
from memopt.solvers.running import Deadline
from memopt.strategies.offload.problem import OffloadProblem

PATIENCE = (0.0, 0.5, 1.0, math.inf)
"""Waiting accepted for an earlier prefetch, as a share of the link's idle time that it saves."""


@dataclass(frozen=True)
class Transfers:
    """The transfers of a schedule, in their order.

    Attributes:
        out: indices of x_j in the order of their copies to the host.
        back: the same indices in the order of their return.
        not_before: x_j → operation before which its prefetch may come at the earliest.
    """

    out: tuple[int, ...]
    back: tuple[int, ...]
    not_before: Mapping[int, int] = field(default_factory=dict)

    def without(self, dropped: set[int]) -> Transfers:
        """Leave out the transfers of some stages, which stay on the device."""
        return Transfers(
            tuple(j for j in self.out if j not in dropped),
            tuple(j for j in self.back if j not in dropped),
            self.not_before,
        )


def ordered_transfers(
    offloaded: Sequence[int], not_before: Mapping[int, int] | None = None
) -> Transfers:
    """Order transfers: out by increasing index, back by decreasing index."""
    indices = sorted(int(j) for j in offloaded)
    return Transfers(tuple(indices), tuple(reversed(indices)), not_before or {})


def best_schedule(
    problem: OffloadProblem, transfers: Transfers, deadline: Deadline | None = None
) -> tuple[tuple[ChainStep, ...], Timeline] | None:
    """Return the fastest schedule over all `PATIENCE`, or over those that there is time for; None
    if none keeps the budget."""
    best: tuple[tuple[ChainStep, ...], Timeline] | None = None
    view, until = chain_to_graph(problem.chain), deadline or Deadline()
    begin_s = time.monotonic()
    for count, patience in enumerate(PATIENCE):
        # One takes about as long as another.
        if best is not None and until.left_s < (time.monotonic() - begin_s) / count:
            break
        steps = build_schedule(problem, transfers, patience)
        if steps is None:
            continue
        timeline = replay(view.graph, view.with_late_gradient(steps), problem.device)
        if best is None or timeline.time_s < best[1].time_s:
            best = steps, timeline
    return best


def build_schedule(
    problem: OffloadProblem, transfers: Transfers, patience: float
) -> tuple[ChainStep, ...] | None:
    """Make the chain steps for some transfers; None if they do not keep the budget.

    An activation that no step needs released is not offloaded at all.
    """
    while True:
        builder = _StepWriter(problem, transfers, patience)
        done = builder.run()
        if not builder.unreleased:
            return tuple(builder.steps) if done else None
        transfers = transfers.without(builder.unreleased)


class _StepWriter:
    """Writes steps in one pass over the operations; tracks memory and the streams' times."""

    def __init__(self, problem: OffloadProblem, transfers: Transfers, patience: float) -> None:
        self.clock = LinkClock(problem.device)
        self.transfers = transfers
        self.patience = patience
        self.stages = problem.stages
        self.sizes = problem.sizes.tolist()
        self.need = problem.need_bytes.tolist()
        self.durations_s = problem.durations_s.tolist()
        self.steps: list[ChainStep] = []
        self.unreleased: set[int] = set()
        """Activations copied to the host but still on the device when read again."""
        self.to_offload = list(transfers.out)
        self.to_release = list(transfers.out)
        self.to_prefetch = list(transfers.back)
        self.waiting = set(transfers.back)
        self.away_bytes = self.back_bytes = 0
        self.total_bytes = sum(self.sizes[j] for j in transfers.out)
        self.allowed = self._allowances()

    def run(self) -> bool:
        """Write all steps; False if an operation cannot be given its room."""
        for k in range(2 * self.stages):
            self._offload(k)
            if not self._prefetch(k) or not self._make_room(k, 0):
                return False
            forward = k < self.stages
            stage = k + 1 if forward else 2 * self.stages - k
            self.steps.append(ChainStep(Move.FORWARD_ALL if forward else Move.BACKWARD, stage))
            self.clock.compute((stage - 1, stage), self.durations_s[k])
        return True

    def _allowances(self) -> list[int]:
        """Return, for each operation, the most bytes that may have come back when it starts, if
        everything else that moves is on the host."""
        allowed = [0] * (2 * self.stages)
        bound, kept = self.total_bytes, 0
        moves = set(self.transfers.out)
        for k in reversed(range(2 * self.stages)):
            # F_k needs x_k and x_{k+1}: they are on the device, whatever has been copied.
            kept += self.sizes[k] if k in moves else 0
            bound = min(bound, self.total_bytes - kept - self.need[k])
            allowed[k] = bound
        return allowed

    def _offload(self, k: int) -> None:
        """OFFLOAD activations that are next in the order and exist before operation k."""
        while self.to_offload and self.to_offload[0] <= k:
            j = self.to_offload.pop(0)
            self.clock.copy_out(j, self.sizes[j])
            self.steps.append(ChainStep(Move.OFFLOAD, j))

    def _releases(self, k: int, more_bytes: int) -> list[int] | None:
        """Return the oldest copies whose release leaves room for operation k and `more_bytes`."""
        lacking = self.need[k] + more_bytes - (self.away_bytes - self.back_bytes)
        chosen = []
        for j in self.to_release:
            if lacking <= 0:
                break
            if j < min(k, self.stages) and j in self.clock.stored_s:
                chosen.append(j)
                lacking -= self.sizes[j]
        return chosen if lacking <= 0 else None

    def _make_room(self, k: int, more_bytes: int) -> bool:
        chosen = self._releases(k, more_bytes)
        if chosen is None:
            return False
        for j in chosen:
            self.clock.free(j)
            self.to_release.remove(j)
            self.away_bytes += self.sizes[j]
            self.steps.append(ChainStep(Move.RELEASE, j))
        return True

    def _prefetch(self, k: int) -> bool:
        """PREFETCH before operation k the activations it reads, and others where worthwhile."""
        reader = 2 * self.stages - 1 - k
        while self.to_prefetch:
            j = self.to_prefetch[0]
            # An activation that B_k reads, or that returns before such a one, cannot wait.
            urgent = k >= self.stages and not self.waiting.isdisjoint((reader, reader + 1))
            if not urgent and not self._worthwhile(k, j):
                return True
            if j in self.to_release:
                if not urgent:
                    return True
                self.unreleased.add(self._next_prefetch())
                self.to_release.remove(j)
                continue
            if not self._make_room(k, self.sizes[j]):
                return False
            self._next_prefetch()
            self.back_bytes += self.sizes[j]
            self.clock.copy_back(j, self.sizes[j])
            self.steps.append(ChainStep(Move.PREFETCH, j))
        return True

    def _next_prefetch(self) -> int:
        """Take the activation that comes back next."""
        j = self.to_prefetch.pop(0)
        self.waiting.discard(j)
        return j

    def _worthwhile(self, k: int, j: int) -> bool:
        """Tell whether x_j may come back before operation k, and better now than after it."""
        if j >= k or self.to_offload or k < self.transfers.not_before.get(j, 0):
            return False
        if self.back_bytes + self.sizes[j] > self.allowed[k]:
            return False
        before, after = self._releases(k, 0), self._releases(k, self.sizes[j])
        if before is None or after is None:
            return False
        clock = self.clock
        without_s = max([clock.now_s, *(clock.stored_s[i] for i in before)])
        with_s = max([clock.now_s, *(clock.stored_s[i] for i in after)])
        wait_s = with_s - without_s
        # The link would be idle until the operation ends if the prefetch came after it.
        idle_s = without_s + self.durations_s[k] - max(with_s, clock.in_free_s)
        return wait_s <= 0 or wait_s <= self.patience * max(0.0, idle_s)
