"""Rotor's persistent program with a choice of alternatives for saving each stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopt.models.chain import Chain
from memopt.models.quantize import SlotScale
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.linearize import Linearization
from memopt.reductions.lower import without_unread_reruns
from memopt.strategies.rotor.model import ChainArrays
from memopt.strategies.shared.graph_model import Allowed
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.stage_alternatives import (
    Alternative,
    first_run,
    plain_runs,
    stage_alternatives,
)
from memopt.strategies.solvers.running import Deadline
from memopt.strategies.store_all import chain_steps

SLOTS = 400
LONGEST_S = 30.0
TIME_SHARE = 0.4
"""Seconds, and share of the time left, for the stages' alternatives; stages after that have one."""


class AlternativesTable:
    """One table for all budgets up to twice the one given, and its programs."""

    def __init__(
        self,
        view: Linearization,
        budget_bytes: int,
        slots: int,
        deadline: Deadline,
        allowed: Allowed | None = None,
    ) -> None:
        self.deadline = deadline
        self.view, self.graph = view, view.graph
        alternatives_s = min(LONGEST_S, TIME_SHARE * deadline.left_s)
        self.alternatives = stage_alternatives(view, allowed, deadline.within(alternatives_s))
        chain = view.chain
        fixed = chain.resident_bytes + chain.input_bytes
        whole = replay_chain(chain, chain_steps(chain)).peak_bytes
        most = max(1, min(whole, 2 * budget_bytes) - fixed)
        self.slot = -(-most // slots)
        self.slots = slots
        self.fixed = fixed
        self.table, self.choice, self.output, self.saved = _filled(
            chain, self.alternatives, self.slot, slots, deadline
        )
        self.complete = not deadline.over

    def best(self, budget_bytes: int) -> tuple[Program | None, Program | None]:
        """Give the fastest program found that fits, and that of the smallest peak."""
        feasible = self._feasible
        if not feasible:
            return None, None
        least = self.program(feasible[0])
        best = Incumbent(self.graph, budget_bytes, tolerance=0.0)
        if best.offer(least).peak_bytes > budget_bytes:
            return None, least
        low, high = 0, len(feasible)
        while high - low > 1 and not self.deadline.passed(0.9, "stage menus"):
            # Programs need less than the chain counts: look for the largest count that fits.
            middle = (low + high) // 2
            if best.offer(self.program(feasible[middle])).peak_bytes > budget_bytes:
                high = middle
            else:
                low = middle
        return best.program, least

    @property
    def _feasible(self) -> list[int]:
        """Slots within which there is a schedule, ascending."""
        n = len(self.view.chain)
        return [m for m in range(self.slots + 1) if self.table[1, n, m] < float("inf")]

    def programs(self, count: int) -> Iterator[Program]:
        """Give the programs of so many numbers of slots, from least memory to most."""
        feasible = self._feasible
        places = {round(k * (len(feasible) - 1) / max(1, count - 1)) for k in range(count)}
        for place in sorted(places if feasible else ()):
            if self.deadline.passed(0.9, "stage menus"):
                return
            yield self.program(feasible[place])

    def program(self, slots: int) -> Program:
        """Read the program of the table's schedule for so many slots."""
        order: list[tuple[int, Alternative | None, bool]] = []
        stack: list[Any] = [(1, len(self.view.chain), slots)]
        while stack:
            item = stack.pop()
            if isinstance(item[1], Alternative):
                order.append(item)
                continue
            s, t, m = item
            pick = int(self.choice[s, t, m])
            if pick > 0:
                order += [(j, None, False) for j in range(s, pick)]
                stack.append((s, pick - 1, m))
                stack.append((pick, t, m - int(self.output[pick - 1])))
            else:
                place = -pick - 1
                alternative = self.alternatives[s - 1][place]
                order.append((s, alternative, False))
                stack.append((s, alternative, True))
                if s < t:
                    stack.append((s + 1, t, m - int(self.saved[s, place])))
        return self._lowered(order)

    def _lowered(self, order: list[tuple[int, Alternative | None, bool]]) -> Program:
        """Make the program of (stage, the alternative where it is saved, whether this is the
        backward), in order."""
        instructions: list[Instruction] = []
        begun: set[int] = set()
        trains = self.graph.first_backward < len(self.graph.operators)
        for stage, alternative, backward in order:
            if stage > len(self.view.stages):
                if backward and (trains or self.graph.tangents):
                    instructions.append(LossBoundary())
                continue
            own = self.view.stages[stage - 1]
            if backward and alternative is not None:
                instructions += alternative.backward
                continue
            forward = plain_runs(own.rerun) if alternative is None else alternative.forward
            instructions += forward if stage in begun else first_run(own, forward)
            begun.add(stage)
        instructions = without_unread_reruns(self.graph, instructions)
        return with_in_place(self.graph, Program(with_frees(self.graph, instructions)))


def _filled(
    chain: Chain, alternatives: list[list[Alternative]], slot: int, slots: int, deadline: Deadline
) -> tuple[Any, Any, Any, Any]:
    """Fill the table; give it, its choices, and the sizes in slots that a trace needs."""
    import numpy as np

    from memopt.strategies.shared.alternatives_kernels import fill

    n = len(chain)
    most = max(map(len, alternatives))
    c = ChainArrays.of(chain, SlotScale(slot))

    def up(size: Any) -> Any:
        return -(-size // slot)

    saved = np.zeros((n + 1, most), np.int64)
    save_need = np.zeros((n + 1, most), np.int64)
    back_need = np.zeros((n + 1, most), np.int64)
    seconds = np.zeros((n + 1, most))
    count = np.array([0, *map(len, alternatives)], np.int64)
    for k, stage in enumerate(chain.stages, start=1):
        gradients_bytes = c.reverse[k] - stage.saved_bytes - stage.backward_overhead_bytes
        for o, one in enumerate(alternatives[k - 1]):
            saved[k, o] = up(one.saved_bytes)
            save_need[k, o] = up(one.saved_bytes + one.forward_overhead_bytes)
            back_need[k, o] = up(gradients_bytes + one.saved_bytes + one.backward_overhead_bytes)
            seconds[k, o] = one.forward_time_s + one.backward_time_s
    walk = np.zeros((n + 2, n + 2), np.int64)
    for s in range(1, n):
        needs = np.maximum.accumulate([0, c.first[s], *c.running[s + 1 : n]])
        walk[s, s + 1 : n + 1] = up(needs[1:])
    table = np.full((n + 2, n + 2, slots + 1), np.inf)
    choice = np.zeros((n + 2, n + 2, slots + 1), np.int64)
    for length in range(n):
        if deadline.passed(0.9 * length / n, "stage menus"):
            break
        fill(
            table, choice, slots, length, c.output, saved, save_need, back_need, up(c.gradient),
            walk, seconds, count, c.forward_sum_s,
        )  # fmt: skip
    return table, choice, c.output, saved
