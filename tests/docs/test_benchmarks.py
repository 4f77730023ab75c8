"""`make bench` runs every benchmark there is, and pages name scripts that exist (history apart)."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import CAPTURES, CPU, GPU

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "benchmarks"


def scripts() -> set[str]:
    """Modules and packages of the folder that can be run."""
    files = {p.stem for p in FOLDER.glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    return (files - {"__main__"}) | {p.parent.name for p in FOLDER.glob("*/__main__.py")}


def test_every_benchmark_is_listed_once() -> None:
    listed = (*CPU, *GPU, *CAPTURES)
    assert len(set(listed)) == len(listed)
    assert set(listed) == scripts()


def test_pages_name_scripts_that_exist() -> None:
    named: set[str] = set()
    for page in (ROOT / "docs").rglob("*.md"):
        if page.parent.name == "history":
            continue
        named |= set(re.findall(r"python -m benchmarks\.(\w+)", page.read_text(encoding="utf-8")))
    assert len(named) > 15
    assert named <= scripts()
