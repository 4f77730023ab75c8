"""Rotor's persistent program with a choice of alternatives for saving each stage."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.linearize import Linearization
from memopt.reductions.lower import without_unread_reruns
from memopt.solvers.running import Deadline, Stopped
from memopt.strategies.rotor.grouping import CELL_S
from memopt.strategies.rotor.model import ChainArrays, options_of
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    FORWARD_ALL,
    SolveLimits,
    TooLarge,
)
from memopt.strategies.shared.graph_model import Allowed
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.stage_alternatives import (
    Alternative,
    first_run,
    plain_runs,
    stage_alternatives,
)
from memopt.strategies.store_all import chain_steps

SLOTS = 400
TABLE_BYTES = 2**33
LONGEST_S = 30.0
HOPELESS = 10.0
"""A table that would take so many times the time left, were all its rows whole, is not begun."""
TIME_SHARE = 0.4
"""Seconds, and share of the time left, for the stages' alternatives; stages after that have one."""


class AlternativesTable:
    """One table for all budgets up to twice the one given, and its programs.

    Attributes:
        alternatives: of each stage.
        budgets: bytes of the chain within which `program` has a schedule, ascending: the least,
            and whole slots.
        complete: whether time and memory sufficed for the table.
    """

    def __init__(
        self,
        view: Linearization,
        budget_bytes: int,
        slots: int,
        deadline: Deadline,
        allowed: Allowed | None = None,
    ) -> None:
        from memopt.strategies.rotor.persistent_kernels import memory_bounds
        from memopt.strategies.rotor.tables import SlotTable, slot_table

        self.deadline = deadline
        self.view, self.graph = view, view.graph
        self.complete = False
        self.budgets: list[int] = []
        self.alternatives: list[list[Alternative]] = []
        if CELL_S * slots * len(view.chain) ** 3 > HOPELESS * deadline.left_s:
            return
        alternatives_s = min(LONGEST_S, TIME_SHARE * deadline.left_s)
        self.alternatives = stage_alternatives(view, allowed, deadline.within(alternatives_s))
        chain = view.chain
        self.fixed = chain.resident_bytes + chain.input_bytes
        whole = replay_chain(chain, chain_steps(chain)).peak_bytes
        most = max(1, min(whole, 2 * budget_bytes) - self.fixed)
        slot = -(-most // slots)
        self.arrays = with_alternatives(chain, self.alternatives, slot)
        part = SlotTable(slot, slots, 0.0, 0.9)
        try:
            limits = SolveLimits(TABLE_BYTES, deadline)
            self.table = slot_table(self.arrays, True, limits, part)
        except (Stopped, TooLarge):
            return
        self.complete = True
        self.floor, _ = memory_bounds(self.arrays, 1, True)
        n, least = len(chain), int(self.floor[1, len(chain)])
        whole_slots = range(max(int(self.table.low[1, n]), least // slot + 1), slots + 1)
        if least <= slots * slot:
            self.budgets = [least, *(m * slot for m in whole_slots)]

    def best(self, budget_bytes: int) -> tuple[Program | None, Program | None]:
        """Return the fastest program found that fits, and that of the smallest peak."""
        if not self.budgets:
            return None, None
        least = self.program(self.budgets[0])
        best = Incumbent(self.graph, budget_bytes, tolerance=0.0)
        if best.offer(least).peak_bytes > budget_bytes:
            return None, least
        low, high = 0, len(self.budgets)
        while high - low > 1 and not self.deadline.passed(0.9, "stage menus"):
            # Programs need less than the chain counts: look for the largest count that fits.
            middle = (low + high) // 2
            if best.offer(self.program(self.budgets[middle])).peak_bytes > budget_bytes:
                high = middle
            else:
                low = middle
        return best.program, least

    def orders(self, count: int) -> Iterator[Program]:
        """Yield the `order` of so many budgets, from least memory to most."""
        last = len(self.budgets) - 1
        places = {round(k * last / max(1, count - 1)) for k in range(count)}
        for place in sorted(places if self.budgets else ()):
            if self.deadline.passed(0.9, "stage menus"):
                return
            yield self.order(self.budgets[place])

    def program(self, memory_bytes: int) -> Program:
        """Read the program of the schedule within a memory, bytes of the chain."""
        return lowered(self.graph, self.order(memory_bytes))

    def order(self, memory_bytes: int) -> Program:
        """Read the schedule within a memory, bytes of the chain: Computes and the loss boundary,
        for `lowered`."""
        from memopt.strategies.rotor.persistent_trace_kernels import persistent_schedule

        codes, options = persistent_schedule(
            self.arrays, self.table, self.floor, memory_bytes, True, True
        )
        moves: list[tuple[int, Alternative | None, bool]] = []
        for code in codes.tolist():
            stage, move = divmod(code, CODE_BASE)
            saved = self.alternatives[stage - 1][options[stage]]
            moves.append(
                (stage, saved if move in (FORWARD_ALL, BACKWARD) else None, move == BACKWARD)
            )
        return Program(self._instructions(moves))

    def _instructions(self, moves: list[tuple[int, Alternative | None, bool]]) -> list[Instruction]:
        """Return the instructions of a schedule, whose items are (stage, alternative by which it is
        saved here or None, whether this is its backward)."""
        instructions: list[Instruction] = []
        begun: set[int] = set()
        trains = self.graph.first_backward < len(self.graph.operators)
        for stage, alternative, backward in moves:
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
        return instructions


def lowered(graph: Graph, order: Program) -> Program:
    """Make a program of an `AlternativesTable.order`."""
    instructions = without_unread_reruns(graph, order.instructions)
    return with_in_place(graph, Program(with_frees(graph, instructions)))


def with_alternatives(
    chain: Chain, alternatives: list[list[Alternative]], slot: int
) -> ChainArrays:
    """Make the arrays of a chain whose stages may be saved by their alternatives."""
    import numpy as np

    c = ChainArrays.of(chain, slot)
    shape = len(chain) + 1, max(map(len, alternatives))
    saved, saving, reverse = (np.zeros(shape, np.int64) for _ in range(3))
    own_s = np.zeros(shape)
    for k, stage in enumerate(chain.stages, start=1):
        gradients_bytes = c.reverse[k] - stage.saved_bytes - stage.backward_overhead_bytes
        for o, one in enumerate(alternatives[k - 1]):
            saved[k, o] = one.saved_bytes
            saving[k, o] = one.saved_bytes + one.forward_overhead_bytes
            reverse[k, o] = gradients_bytes + one.saved_bytes + one.backward_overhead_bytes
            own_s[k, o] = one.forward_time_s + one.backward_time_s
    count = np.array([0, *map(len, alternatives)], np.int64)
    return c._replace(options=options_of(count, saved, saving, reverse, own_s, slot))
