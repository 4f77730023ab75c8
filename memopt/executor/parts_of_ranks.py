"""What ranks tell one another about the parts of a model that they run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memopt.executor.measured_parts import (
    MOST_CALLS,
    PartCalls,
    PartKey,
    PlannedPart,
    StepKind,
)
from memopt.step.ranks import Ranks

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

CALLED = "the parts that a step called are counted"


def saw(ranks: Ranks, kind: StepKind, calls: PartCalls, parts: Iterable[PlannedPart]) -> bool:
    """Remember how often the last step called each part; return whether it called one that ranks
    run together more often than each step before. These are called alike on all ranks, which
    therefore meet here: each then counts the others' calls of further parts, too."""
    if not (kind.knows(calls) or any(calls <= one for one in kind.untold)):
        kind.untold = [*kind.untold, calls][-MOST_CALLS:]
    alike = {part: times for part, times in calls.items() if part.members == ranks.members}
    if not kind.saw(PartCalls(alike)):
        return False
    for told in ranks.exchanged(kind.tell(), CALLED):
        kind.hear(told, parts)
    return True


def by_first(
    ranks: Ranks,
    firsts: Mapping[PartKey, PlanRecord],
    make: Callable[[], Mapping[PartKey, PlanRecord]],
) -> dict[PartKey, PlanRecord]:
    """Return the plans that the first rank makes, of those parts that have first plans here.

    Raises:
        RankError: a rank is gone. An error that `make` raises is raised on every rank.
    """

    def portable() -> dict[PartKey, PlanRecord | None]:
        return {
            key: None if plan is firsts[key] else replace(plan, profiled=None, record=None)
            for key, plan in make().items()
        }

    found = ranks.from_first(portable, "rank 0 plans parts")
    return {
        key: first if plan is None else replace(plan, profiled=first.profiled, record=first.record)
        for key, first in firsts.items()
        if key in found
        for plan in [found[key]]
    }
