"""Rotor with stage menus: the whole step as one stage, and the chain's program with cheap
recomputation inside each backward and a choice of implementations."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from memopt.models.bounds import memory_lower_bound, time_lower_bound
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.programs.replay import Timeline, replay
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.lower import without_unread_reruns
from memopt.reductions.stage_map import StageOperators, has_updates
from memopt.strategies.base import CostModel, Features, Progress, Solution, Strategy, stops
from memopt.strategies.monet.counting import counted_exactly
from memopt.strategies.monet.incumbent import rotor_programs, smaller
from memopt.strategies.monet.moment_search import MomentSearch
from memopt.strategies.monet.moments import Allowed
from memopt.strategies.monet.solutions import solution, without_plan
from memopt.strategies.monet.stage_options import Option, first_run, menus
from memopt.strategies.store_all import chain_steps

SAME = 1e-9
CLOSE = 1e-3
"""Gap to the bound at which no menus are tried."""
MENU_SLOTS = 400
MENUS_S = 30.0
MENUS_SHARE = 0.4
"""Seconds, and share of the time left, for the stages' options; stages after that have one."""


@dataclass(frozen=True)
class RotorMenus(Strategy):
    """Rotor's persistent program with a menu of ways to save each stage; never worse than Rotor.

    Attributes:
        slots: memory is counted in so many slots of twice the budget, sizes rounded up.
        exact_only: leave out implementations that change rounding.
        merged_s: seconds for the whole step as one stage (`MomentSearch`), which comes first: it
            gives the bound, and for deep models, whose table takes long, most often the plan.
    """

    slots: int = MENU_SLOTS
    exact_only: bool = True
    merged_s: float = 30.0

    name: ClassVar[str] = "rotor-menus"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(recompute=True, implementations=True)

    def only_exact_implementations(self) -> bool | None:
        return self.exact_only

    def why_not(self, cost_model: CostModel) -> str | None:
        if isinstance(cost_model, Graph) and has_updates(cost_model):
            return "rotor-menus plans steps without parameter updates: profile without optimizer"
        return super().why_not(cost_model)

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        graph, begin = self.taken(cost_model, Graph), time.monotonic()
        deadline = begin + (math.inf if time_limit_s is None else time_limit_s)
        watch = Watch(deadline, progress)
        view = None if budget_bytes is None else linearize(graph)
        best, smallest = rotor_programs(graph, budget_bytes, view)
        timeline = None if best is None else replay(graph, best)
        plain_s = math.inf if timeline is None else timeline.time_s
        stats: dict[str, object] = {"rotor_found": best is not None, "rotor_s": plain_s}
        least_s, searched, proved = time_lower_bound(graph), False, False
        if view is not None and budget_bytes is not None and plain_s > least_s * (1 + SAME):
            search = self._merged(graph, budget_bytes, watch, stats)
            merged, bound_s = (None, 0.0) if search is None else (search.best, search.bound_s)
            if search is not None:
                proved = search.infeasible and counted_exactly(graph)
                proved = proved or memory_lower_bound(graph) > budget_bytes
            least_s = max(least_s, bound_s)
            best, timeline = _faster(graph, merged, best, timeline, stats, "merged_s")
            if timeline is None or timeline.time_s > least_s * (1 + CLOSE):
                programs, least, searched = self._menus(view, budget_bytes, watch, stats)
                smallest = smallest if least is None else smaller(graph, smallest, least)
                best, timeline = _faster(graph, programs, best, timeline, stats, "menus_s")
        stats["searched"] = searched
        stats["solve_s"] = time.monotonic() - begin
        if best is None or timeline is None:
            return without_plan(graph, smallest, proved, stats)
        return solution(graph, best, least_s, SAME, stats)

    def allowed(self, operator: Operator, name: str) -> bool:
        """Whether the plan may run `operator` by its implementation `name`."""
        return not self.exact_only or next(
            choice.exact for choice in operator.implementations if choice.name == name
        )

    def _menus(
        self, view: Linearization, budget_bytes: int, watch: Watch, stats: dict[str, object]
    ) -> tuple[Program | None, Program | None, bool]:
        """(the best program of the stages' menus, that of the smallest peak, whether it ended)."""
        if watch.stops(0.0):
            return None, None, False
        stats["stages"] = len(view.chain)
        table = MenuTable(view, budget_bytes, self.slots, watch, self.allowed)
        stats["options"] = sum(map(len, table.options))
        if not table.complete:
            return None, None, False
        return *table.best(budget_bytes), True

    def _merged(
        self, graph: Graph, budget_bytes: int, watch: Watch, stats: dict[str, object]
    ) -> MomentSearch | None:
        """The whole step as one stage, implementations included; None without time for it."""
        if self.merged_s <= 0 or watch.stops(0.9):
            return None
        until = min(watch.deadline, time.monotonic() + self.merged_s)
        search = MomentSearch(graph, self.allowed, budget_bytes, until, watch.progress)
        search.run()
        stats["merged_rounds"] = search.rounds
        return search


def _faster(
    graph: Graph,
    program: Program | None,
    best: Program | None,
    timeline: Timeline | None,
    stats: dict[str, object],
    key: str,
) -> tuple[Program | None, Timeline | None]:
    """The best program so far and its timeline, or `program` and its if that is faster."""
    if program is None:
        return best, timeline
    found = replay(graph, program)
    stats[key] = found.time_s
    if timeline is None or found.time_s < timeline.time_s * (1 - SAME):
        return program, found
    return best, timeline


class Watch:
    """The time limit and the caller's interrupt, asked now and then."""

    def __init__(self, deadline: float, progress: Progress | None) -> None:
        self.deadline, self.progress = deadline, progress
        self.stopped = False

    def stops(self, fraction: float) -> bool:
        """Whether to end the search here; tells the caller how far it is."""
        interrupted = stops(self.progress, fraction, "stage menus")
        self.stopped = self.stopped or interrupted or time.monotonic() >= self.deadline
        return self.stopped


class MenuTable:
    """One table for all budgets up to twice the one given, and its programs."""

    def __init__(
        self,
        view: Linearization,
        budget_bytes: int,
        slots: int,
        watch: Watch,
        allowed: Allowed | None = None,
    ) -> None:
        self.watch = watch
        self.view, self.graph = view, view.graph
        begin = time.monotonic()
        share = MENUS_SHARE * max(0.0, watch.deadline - begin)
        self.options = menus(view, allowed, begin + min(MENUS_S, share))
        chain = view.chain
        fixed = chain.resident_bytes + chain.input_bytes
        whole = replay_chain(chain, chain_steps(chain)).peak_bytes
        most = max(1, min(whole, 2 * budget_bytes) - fixed)
        self.slot = -(-most // slots)
        self.slots = slots
        self.fixed = fixed
        self.table, self.choice, self.output, self.saved = _filled(
            chain, self.options, self.slot, slots, watch
        )
        self.complete = not watch.stopped

    def best(self, budget_bytes: int) -> tuple[Program | None, Program | None]:
        """(the fastest program found that fits, that of the smallest peak)."""
        n = len(self.view.chain)
        feasible = [m for m in range(self.slots + 1) if self.table[1, n, m] < float("inf")]
        if not feasible:
            return None, None
        least = program = self.program(feasible[0])
        if replay(self.graph, program).peak_bytes > budget_bytes:
            return None, least
        best, best_s = program, replay(self.graph, program).time_s
        low, high = 0, len(feasible)
        while high - low > 1 and not self.watch.stops(0.9):
            # Programs need less than the chain counts: look for the largest count that fits.
            middle = (low + high) // 2
            program = self.program(feasible[middle])
            timeline = replay(self.graph, program)
            if timeline.peak_bytes > budget_bytes:
                high = middle
                continue
            low = middle
            if timeline.time_s < best_s:
                best, best_s = program, timeline.time_s
        return best, least

    def program(self, slots: int) -> Program:
        """The program of the table's schedule for so many slots."""
        order: list[tuple[int, Option | None, bool]] = []
        stack: list[Any] = [(1, len(self.view.chain), slots)]
        while stack:
            item = stack.pop()
            if isinstance(item[1], Option):
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
                option = self.options[s - 1][place]
                order.append((s, option, False))
                stack.append((s, option, True))
                if s < t:
                    stack.append((s + 1, t, m - int(self.saved[s, place])))
        return self._lowered(order)

    def _lowered(self, order: list[tuple[int, Option | None, bool]]) -> Program:
        """The runs of (stage, its option where that is kept for the backward, whether this is the
        backward), in order."""
        instructions: list[Instruction] = []
        begun: set[int] = set()
        trains = self.graph.first_backward < len(self.graph.operators)
        for stage, option, backward in order:
            if stage > len(self.view.stages):
                if backward and (trains or self.graph.tangents):
                    instructions.append(LossBoundary())
                continue
            own = self.view.stages[stage - 1]
            if backward and option is not None:
                instructions += option.backward
                continue
            forward = option.forward if option is not None else _plain_runs(own)
            instructions += forward if stage in begun else first_run(own, forward)
            begun.add(stage)
        instructions = without_unread_reruns(self.graph, instructions)
        return with_in_place(self.graph, Program(with_frees(self.graph, instructions)))


def _plain_runs(stage: StageOperators) -> tuple[Compute, ...]:
    return tuple(Compute(i, ()) for i in stage.rerun)


def _filled(
    chain: Chain, options: list[list[Option]], slot: int, slots: int, watch: Watch
) -> tuple[Any, Any, Any, Any]:
    """The table, its choices, and the sizes in slots that a trace needs."""
    import numpy as np

    from memopt.strategies.monet.menu_kernels import fill

    n = len(chain)
    most = max(map(len, options))
    later = [0] * (n + 2)
    for k in range(n - 1, -1, -1):
        later[k] = later[k + 1] + chain.stages[k].parameter_gradient_bytes

    def up(size: int) -> int:
        return -(-size // slot)

    output = np.array([up(chain.activation_bytes(k)) for k in range(n + 1)], np.int64)
    # While δ^t is live so are the parameter gradients of the stages above t.
    grad_bytes = [chain.gradient_bytes(k) + later[k] for k in range(n + 1)]
    gradient = np.array([up(size) for size in grad_bytes], np.int64)
    saved = np.zeros((n + 1, most), np.int64)
    save_need = np.zeros((n + 1, most), np.int64)
    back_need = np.zeros((n + 1, most), np.int64)
    seconds = np.zeros((n + 1, most))
    count = np.array([0, *map(len, options)], np.int64)
    for k, stage in enumerate(chain.stages, start=1):
        for o, option in enumerate(options[k - 1]):
            saved[k, o] = up(option.saved_bytes)
            save_need[k, o] = up(option.saved_bytes + option.forward_overhead_bytes)
            back_need[k, o] = up(
                grad_bytes[k]
                + chain.gradient_bytes(k - 1)
                + stage.parameter_gradient_bytes
                + option.saved_bytes
                + option.backward_overhead_bytes
            )
            seconds[k, o] = option.forward_time_s + option.backward_time_s
    walk = np.zeros((n + 2, n + 2), np.int64)
    for s in range(1, n + 1):
        need = 0
        for split in range(s + 1, n + 1):
            stage = chain.stages[split - 2]
            before = 0 if split - 1 == s else chain.activation_bytes(split - 2)
            need = max(need, before + stage.output_bytes + stage.no_save_overhead_bytes)
            walk[s, split] = up(need)
    forward_sum = np.cumsum([0.0, *(stage.forward_time_s for stage in chain.stages)])
    table = np.full((n + 2, n + 2, slots + 1), np.inf)
    choice = np.zeros((n + 2, n + 2, slots + 1), np.int64)
    for length in range(n):
        if watch.stops(0.9 * length / n):
            break
        fill(
            table, choice, slots, length, output, saved, save_need, back_need, gradient, walk,
            seconds, count, forward_sum,
        )  # fmt: skip
    return table, choice, output, saved
