"""All rows of the table of faults: `python -m tests.faults.table` prints it for the docs, and
`python -m pytest tests/faults -m slow -s --timeout 3600` injects each at every place."""

from __future__ import annotations

import sys

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
from tests.faults.fault import FAULTS, Fault, Part

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
    """The faults of all modules, by what they hit."""
    order = list(Part)
    return sorted(FAULTS, key=lambda one: order.index(one.part))


def markdown() -> str:
    """The table, a section for each part."""
    lines = []
    for part in Part:
        rows = [one for one in every_fault() if one.part is part]
        lines += [f"### {part.value[0].upper()}{part.value[1:]}: {len(rows)}", ""]
        lines += ["| what happens | what holds |", "|---|---|"]
        lines += [f"| {one.name} | {one.promise} |" for one in rows]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
