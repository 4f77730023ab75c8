"""Records the stages and passes that made a plan, with their options, for plan files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from memopt.models.codec import SPARSE, Check, Line

STAGE_NAMES = (
    "capture",
    "accumulate",
    "charge",
    "movable",
    "host updates",
    "alternatives",
    "placeable",
    "agree",
)
"""The stages that planning records, in order; see `memopt.stages`."""
PASS_NAMES = ("order", "place")
"""The passes over a strategy's program that a user asks for, in order."""

EXACT, ROUNDING = "exact", "other rounding"
"""The alternatives of a step: those that give the same bits, or all."""

_Name = Annotated[
    str,
    Check("the name of a stage or a pass", lambda name: name in (*STAGE_NAMES, *PASS_NAMES)),
]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage, or a pass, that ran."""

    name: _Name
    options: tuple[Line, ...] = field(default=(), metadata=SPARSE)


def with_record(
    records: Iterable[StageRecord], name: str, *options: str
) -> tuple[StageRecord, ...]:
    """Add a stage to those that ran. A stage that runs again is recorded once, as it ran last."""
    others = (one for one in records if one.name != name)
    return (*others, StageRecord(name, options))


def options_of(records: Iterable[StageRecord], name: str) -> tuple[str, ...] | None:
    """Return the options that a stage ran with; None: it did not run."""
    return next((one.options for one in records if one.name == name), None)
