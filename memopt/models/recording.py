"""The timeline of a measured step: plain records, made by the executor, drawn by the reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Occupied(Enum):
    """The kinds of work that occupy a step's streams."""

    COMPUTE = "compute"
    WAIT = "wait"
    TO_HOST = "to host"
    FROM_HOST = "from host"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One instruction's compute, wait or transfer.

    Attributes:
        what: on the compute stream (COMPUTE, WAIT) or a copy.
        position: the instruction's index in the program; for a copy, that of its SwapOut or SwapIn.
        start_s: seconds from the start of the step.
        end_s: seconds.
    """

    what: Occupied
    position: int
    start_s: float
    end_s: float
