"""The rows' type, and the supported versions; imports no torch.

A name is dotted from `torch`. Its last part may be an attribute of instances only: one that the
class declares in its annotations, or that the object made by `of` has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

SUPPORTED = ("2.11", "2.13", "2.14", "2.15")
"""The versions of torch that memopt supports; a make target tests each."""
KNOWN = SUPPORTED
"""The versions whose sources the rows were compared with."""
LATER = KNOWN[1:]
"""The versions but the first, which differs the most."""


@dataclass(frozen=True, slots=True)
class Row:
    """A private name of torch's, or a public one that memopt patches.

    Attributes:
        name: dotted, from `torch`.
        purpose: completes "memopt needs it to".
        instead: what happens without it, warned of and counted; "": a CaptureError that names it.
        versions: the versions among `KNOWN` that have it.
        of: makes the object that has the last part as an attribute, if it cannot be imported.
        needs: "cuda" or "distributed": torch must be built with it; "": nothing.
    """

    name: str
    purpose: str
    instead: str = ""
    versions: tuple[str, ...] = KNOWN
    of: Callable[[], object] | None = None
    needs: str = ""

    @property
    def required(self) -> bool:
        """Whether memopt fails without it."""
        return not self.instead

    @property
    def effect(self) -> str:
        """Say, in a message, what happens without it."""
        return f"warning: {self.instead}" if self.instead else "CaptureError"


def rows(
    purpose: str,
    home: str,
    *names: str,
    instead: str = "",
    versions: tuple[str, ...] = KNOWN,
    of: Callable[[], object] | None = None,
    needs: str = "",
) -> Iterator[Row]:
    """Yield rows for several names of one module or class."""
    for name in names:
        yield Row(f"{home}.{name}", purpose, instead, versions, of, needs)
