"""When a dynamic program must stop: its deadline, its user, the size of its table."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.strategies.solvers.running import Deadline


class Stopped(Exception):
    """The deadline has passed or the user has interrupted."""


class TooLarge(Exception):
    """A table would be larger than allowed; it was not allocated.

    Attributes:
        needed_bytes: what it needs, bytes (a lower bound where the size is found on the way).
    """

    def __init__(self, message: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class SolveLimits:
    """Limits of one solve.

    Attributes:
        table_bytes: largest size of a program's table.
        deadline: when the solve must end.
    """

    table_bytes: int
    deadline: Deadline

    def report(self, fraction: float, what: str) -> None:
        """Tell the user how far the solve is; raise Stopped if it is to end."""
        if self.deadline.passed(fraction, what):
            raise Stopped

    def check_bytes(self, needed_bytes: int) -> None:
        """Raise TooLarge if a table of that size is not allowed."""
        if needed_bytes > self.table_bytes:
            raise TooLarge(
                f"the table needs {needed_bytes} bytes, {self.table_bytes} are allowed",
                needed_bytes,
            )
