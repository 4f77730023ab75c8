"""Runs a solver: its options, its deadline, and Ctrl-C while it works.

Solvers run in a thread of their own, so that the caller sees progress and may interrupt. CP-SAT's
own handler of Ctrl-C stays off: it would not restore Python's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from memopt.models.progress import Progress, stops
from memopt.models.status import Status

POLL_S = 0.1
GRACE_S, GRACE_SHARE = 0.1, 0.05
"""Seconds, and share of its time limit, by which a solver that cannot be stopped may overrun it."""

T = TypeVar("T")


class Solver(StrEnum):
    """The solvers that take a 0-1 program."""

    CP_SAT = "cp-sat"
    HIGHS = "highs"
    SCIP = "scip"


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Options of one solve.

    Attributes:
        solver: which solver runs.
        time_limit_s: seconds; None: no limit.
        deterministic_s: CP-SAT's deterministic time, of which one is a few seconds; ends the
            search at the same answer on any machine. None: no limit.
        progress: called now and then; KeyboardInterrupt ends the search: CP-SAT returns its best
            solution so far, the others return nothing.
        workers: CP-SAT's threads; the others run on one.
        seed: the solver's random seed.
        gap: relative gap at which the search may end.
        linearize: whether CP-SAT solves linear relaxations beside.
    """

    solver: Solver = Solver.CP_SAT
    time_limit_s: float | None = None
    deterministic_s: float | None = None
    progress: Progress | None = None
    workers: int = 1
    seed: int = 0
    gap: float = 0.0
    linearize: bool = True


class Stopped(Exception):
    """The deadline has passed or the user has interrupted."""


@dataclass
class Deadline:
    """The deadline of a search.

    Attributes:
        at_s: the end, by time.monotonic's clock.
        progress: called by `passed`; KeyboardInterrupt ends the search.
        over: whether `passed` has returned True.
    """

    at_s: float = math.inf
    progress: Progress | None = None
    over: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.at_s):
            raise ValueError("time_limit_s must be a number of seconds, got nan")

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.at_s - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Return a deadline in so many seconds, or this one if it is earlier."""
        return Deadline(min(self.at_s, time.monotonic() + seconds), self.progress)

    def passed(self, fraction: float, what: str) -> bool:
        """Report progress, and tell whether the search must end."""
        interrupted = stops(self.progress, fraction, what)
        self.over = self.over or interrupted or time.monotonic() >= self.at_s
        return self.over

    def check(self, fraction: float, what: str) -> None:
        """Report progress, and raise Stopped if the search must end."""
        if self.passed(fraction, what):
            raise Stopped


def call_in_thread(
    call: Callable[[], T],
    progress: Progress | None,
    what: Callable[[], str],
    *,
    limit_s: float | None = None,
    stop: Callable[[], None] | None = None,
) -> T | None:
    """Run a call in a thread and return its result; None if it is not waited for any longer.

    Without `stop`, a call that is interrupted or overruns is abandoned: its thread ends at the
    solver's own time limit, or with the process.

    Args:
        call: the function to run; it must release the GIL now and then.
        progress: called now and then, in this thread; KeyboardInterrupt ends the wait, as does
            Ctrl-C itself.
        what: returns the text to report.
        limit_s: the solver's time limit, if it has one.
        stop: makes `call` return soon with its best result so far, which is then waited for.

    Raises:
        Whatever `call` raises.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    # Not `Thread.join`: interrupted, it takes a running thread for one that has ended.
    ended = threading.Event()

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001  (the calling thread raises it)
            failed.append(error)
        ended.set()

    thread = threading.Thread(target=run, name="memopt-solver", daemon=True)
    if stop is None and limit_s is not None:
        limit_s += GRACE_S + GRACE_SHARE * limit_s
    until = math.inf if limit_s is None else time.monotonic() + limit_s
    thread.start()
    try:
        while not ended.wait(min(POLL_S, max(0.0, until - time.monotonic()))):
            if stops(progress, 0.5, what()) or time.monotonic() > until:
                break
    except KeyboardInterrupt:
        # Ctrl-C without a `progress` that raises it.
        pass
    while not ended.is_set():
        if stop is None:
            return None
        stop()
        ended.wait(POLL_S)
    if failed:
        raise failed[0]
    return done[0]


def solve_with_cp_sat(
    model: Any,
    options: SolverOptions,
    *,
    scale: float = 1.0,
    watch: Callable[[float, float], None] | None = None,
) -> tuple[Status, Any]:
    """Solve a CP-SAT model.

    Args:
        model: a constraint model, with an objective or without.
        options: the solver is CP-SAT.
        scale: the factor of the objective's costs, for the reported figures.
        watch: called in the caller's thread with (objective, bound) after either has improved; it
            may raise KeyboardInterrupt, as `options.progress` may.

    Returns:
        The status, and the solver, which knows the values and the bound.

    Raises:
        ValueError: the solver rejects the model.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = options.workers
    solver.parameters.random_seed = options.seed
    solver.parameters.relative_gap_limit = options.gap
    if not options.linearize:
        solver.parameters.linearization_level = 0
    if options.time_limit_s is not None:
        solver.parameters.max_time_in_seconds = max(0.0, options.time_limit_s)
    if options.deterministic_s is not None:
        solver.parameters.max_deterministic_time = options.deterministic_s
    solver.parameters.catch_sigint_signal = False
    known = {"best": math.inf, "bound": 0.0}

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            known["best"] = self.objective_value / scale

    def on_bound(bound: float) -> None:
        known["bound"] = bound / scale

    told = dict(known)

    def report(fraction: float, what: str) -> None:
        if watch is not None and told != known and math.isfinite(known["best"]):
            told.update(known)
            watch(told["best"], told["bound"])
        if options.progress is not None:
            options.progress(fraction, what)

    solver.best_bound_callback = on_bound
    code = call_in_thread(
        lambda: solver.solve(model, Listener()),
        report,
        lambda: f"ilp: {known['best']:.6g}, bound {known['bound']:.6g}",
        limit_s=options.time_limit_s,
        stop=solver.stop_search,
    )
    if code == cp_model.MODEL_INVALID:
        raise ValueError(f"the constraint model is invalid: {model.validate()}")
    return Status[solver.status_name(code)], solver
