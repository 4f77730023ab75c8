"""Looks for a better plan in a process of its own while a wrapped model trains."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace

from memopt.api.finish import finish
from memopt.api.solving import finished_record
from memopt.errors import MemoptError
from memopt.models.budget import Budget
from memopt.models.options import PassOptions
from memopt.plan_record import PlanRecord
from memopt.programs.solution import Solution
from memopt.strategies import Strategy
from memopt.strategies.apart import SolvedApart, SolveRequest
from memopt.strategies.target import Target

_LOG = logging.getLogger(__name__)
FASTER = 1e-3
"""Share of the step's time by which a plan must be faster to be taken over."""


class Improving:
    """A search for a plan that is better than the one that runs."""

    def __init__(
        self,
        plan: PlanRecord,
        strategy: Strategy,
        limit_bytes: int | None,
        time_limit_s: float | None,
        keep: Callable[[PlanRecord], object],
        aloud: bool,
    ) -> None:
        self._plan, self._strategy, self._limit_bytes = plan, strategy, limit_bytes
        self._keep, self._aloud = keep, aloud
        self._search: SolvedApart | None = None
        self._better: PlanRecord | None = None
        request = SolveRequest(strategy, plan.graph, limit_bytes, plan.device, time_limit_s)
        try:
            self._search = SolvedApart(request)
        except (OSError, pickle.PicklingError) as error:
            _LOG.warning("no better plan is looked for: %s", error)

    @property
    def ended(self) -> bool:
        """Tell whether the search has ended."""
        return self._search is None or self._search.ended

    def stop(self) -> None:
        """Give the search up."""
        if self._search is not None:
            self._search.stop()
            self._search = None

    def better(self) -> PlanRecord | None:
        """Return the better plan of a search that has ended, if it found one, also when asked again
        after an interruption."""
        if self._better is None and self._search is not None:
            self._better = self._found(self._search.solution())
        return self._better

    def _found(self, solution: Solution | None) -> PlanRecord | None:
        """Return the plan of a solution if it is worth taking over, kept on disk."""
        if solution is None or not solution.plans:
            return None
        try:
            made = self._made(solution)
        except MemoptError as error:
            _LOG.warning("the plan that was looked for is not taken over: %s", error)
            return None
        if made is None or made.step_time_s >= self._plan.step_time_s * (1 - FASTER):
            return None
        self._keep(made)
        self._say(made)
        return made

    def _made(self, solution: Solution) -> PlanRecord | None:
        """Make the plan of a solution: validated and replayed here."""
        old = self._plan
        target = Target.of(self._strategy, old.graph)
        limit = Budget(self._limit_bytes, old.host_budget)
        finished = finish(target, solution, limit, old.device, PassOptions(), None)
        if isinstance(finished, Solution):
            return None
        limit = Budget(old.budget, old.host_budget)
        made = finished_record(target, finished, limit, old.baseline, old.device, old.profiled)
        return replace(made, stages=old.stages, notes=old.notes, record=old.record)

    def _say(self, made: PlanRecord) -> None:
        before, now = self._plan.step_time_s, made.step_time_s
        text = (
            f"memopt: a better plan takes over: steps of {1e3 * now:.4g} ms instead of "
            f"{1e3 * before:.4g} ms (predicted), {made.stats.get('reason', '')}"
        )
        _LOG.info("%s", text)
        if self._aloud and sys.stderr.isatty():
            sys.stderr.write(text + "\n")
