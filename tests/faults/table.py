"""All rows of the table of faults."""

from __future__ import annotations

from tests.faults import (
    content_faults,
    kept_faults,
    misuse_faults,
    planning_faults,
    saving_faults,
    step_faults,
    transfer_faults,
    whole_faults,
)
from tests.faults.fault import FAULTS, Fault

PLACES = (
    step_faults,
    transfer_faults,
    misuse_faults,
    whole_faults,
    planning_faults,
    saving_faults,
    content_faults,
    kept_faults,
)


def every_fault() -> list[Fault]:
    """The faults of all modules, in order."""
    return FAULTS
