"""How CP-SAT solves OLLA's programs of orders and addresses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from memopt.solvers.running import SolverOptions


@dataclass(frozen=True, slots=True)
class CpSat:
    """Options of OLLA's programs in CP-SAT.

    Attributes:
        workers: threads; with more than one the same problem may give another result.
        seed: the solver's random seed.
        warm_start: begin from what the search finds, and with its bounds; else from the framework's
            order and greedy addresses.
        effort: limit of each program, in CP-SAT's deterministic time, of which one is a few
            seconds.
    """

    workers: int = 1
    seed: int = 0
    warm_start: bool = True
    effort: float = 60.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"CpSat: workers must be at least 1, got {self.workers}")
        if not self.effort > 0:
            raise ValueError(f"CpSat: effort must be above 0, got {self.effort}")

    def options(self, time_limit_s: float | None, effort: float | None = None) -> SolverOptions:
        """Return the solver's options; `effort` is in place of its own."""
        return SolverOptions(
            time_limit_s=time_limit_s,
            deterministic_s=max(0.0, self.effort if effort is None else effort),
            workers=self.workers,
            seed=self.seed,
        )


def ran_out(options: SolverOptions, effort: float) -> bool:
    """Tell whether the limit of effort has ended a solve that took so much."""
    return options.deterministic_s is not None and effort >= 0.99 * options.deterministic_s


Improvement = Callable[[float, int, int], None]
"""Called with (seconds since the start, peak bytes, bound bytes)."""


class TimedSearch:
    """A search with a wall-clock limit that reports its improvements."""

    def __init__(
        self, time_limit_s: float | None, on_improvement: Improvement | None = None
    ) -> None:
        self.started_s = time.monotonic()
        self.time_limit_s = time_limit_s
        self.on_improvement = on_improvement
        self.interrupted = False

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started_s

    def left_s(self) -> float | None:
        """Return the seconds left; None: there is no limit."""
        return None if self.time_limit_s is None else self.time_limit_s - self.elapsed_s()

    def out_of_time(self) -> bool:
        """Tell whether the time limit has passed."""
        return self.time_limit_s is not None and self.elapsed_s() >= self.time_limit_s

    def tell(self, peak: int, bound: int) -> None:
        """Report an improvement to the listener, if any."""
        if self.on_improvement is not None:
            self.on_improvement(self.elapsed_s(), peak, bound)
