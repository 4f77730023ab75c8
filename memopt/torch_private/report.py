"""The table for the torch that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from memopt.torch_private.access import expected, found
from memopt.torch_private.rows import ROWS
from memopt.torch_private.table import Row


class RowState(StrEnum):
    """Whether the installed torch has what a row names."""

    OK = "ok"
    MISSING = "missing"
    OTHER = "not needed"
    """Missing, but not expected: only other versions or builds of torch have it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row, and whether the installed torch has what it names."""

    row: Row
    state: RowState

    @property
    def breaks(self) -> bool:
        """Whether memopt cannot work here."""
        return self.state is RowState.MISSING and self.row.required


def findings() -> Iterator[Finding]:
    """Check each row against the installed torch.

    Raises:
        ImportError: torch is not installed.
    """
    for row in ROWS:
        try:
            found(row)
        except (ImportError, AttributeError):
            yield Finding(row, RowState.MISSING if expected(row) else RowState.OTHER)
        else:
            yield Finding(row, RowState.OK)
