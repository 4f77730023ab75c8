"""OLLA's program of an order: one for each independent part of the problem that holds the peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat, ran_out
from memopt.passes.order.lifetime_model import MOST_VARIABLES, solve_lifetimes, variables
from memopt.passes.order.mincut import forced_live
from memopt.passes.order.task_contraction import eager, independent_parts, part_of
from memopt.passes.order.tasks import Tasks


@dataclass(frozen=True, slots=True)
class PartsAnswer:
    """The answer of the programs of all parts.

    Attributes:
        order: the best order, of all tasks.
        bound: of every order's peak, bytes.
        variables: of all programs that were made.
        too_large: variables of a program that was too large to be made; 0 if none was.
        interrupted: whether the search ended by neither a proof nor a limit.
    """

    order: tuple[int, ...]
    bound: int
    variables: int
    too_large: int = 0
    interrupted: bool = False


def solve_by_parts(
    tasks: Tasks,
    start: Sequence[int],
    how: CpSat,
    *,
    least: int,
    left_s: Callable[[], float | None],
    watch: Callable[[int, int], None],
) -> PartsAnswer:
    """Order the part that holds the peak for the least peak, then the next, until the peak is that
    of a part whose order is proved best.

    Args:
        tasks: the problem.
        start: a valid order, see `CpSat.warm_start`.
        how: options of the solver.
        least: bytes; an order of at most this peak ends the search.
        left_s: returns the wall clock left; None: there is no limit.
        watch: called with (peak, bound), bytes, when one has improved.
    """
    order, bound, count, spent = eager(tasks, start), tasks.base, 0, 0.0
    while True:
        profile = tasks.profile(order)
        peak = max(profile, default=tasks.base)
        if peak <= max(least, bound):
            return PartsAnswer(tuple(order), bound, count)
        at = profile.index(peak)
        begin, end = next(x for x in independent_parts(tasks, order) if x[0] <= at < x[1])
        part = part_of(tasks, order, begin, end)
        size, seconds = variables(part), left_s()
        bound = max(bound, *forced_live(part))
        if peak <= bound:
            return PartsAnswer(tuple(order), bound, count)
        if size > MOST_VARIABLES:
            return PartsAnswer(tuple(order), bound, count, too_large=size)
        count += size
        others = max((*profile[:begin], *profile[end:]), default=tasks.base)

        def improved(peak: float, proved: float, others: int = others, bound: int = bound) -> None:
            watch(max(others, int(peak)), max(bound, int(proved)))

        # Below all others is enough.
        aim = max(least, bound, others - 1)
        options = how.options(seconds, how.effort - spent)
        answer = solve_lifetimes(part, range(len(part)), aim, options, improved)
        bound, spent = max(bound, answer.bound), spent + answer.effort
        inside = order[begin:end]
        order[begin:end] = [inside[task - 1] for task in answer.order[1:]] or inside
        order = eager(tasks, order)
        if answer.status is not Status.OPTIMAL:
            seconds = left_s()
            limited = ran_out(options, answer.effort) or (seconds is not None and seconds <= 0)
            return PartsAnswer(tuple(order), bound, count, interrupted=not limited)
