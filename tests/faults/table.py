"""All rows of the table of faults."""

from __future__ import annotations

from tests.faults import step_faults
from tests.faults.fault import FAULTS, Fault

PLACES = (step_faults,)


def every_fault() -> list[Fault]:
    """The faults of all modules, in order."""
    return FAULTS
