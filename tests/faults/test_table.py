"""The table of faults is as large as it is said to be, and the one in the docs."""

from __future__ import annotations

from pathlib import Path

from tests.faults import table
from tests.faults.fault import Part
from tests.faults.table import every_fault, markdown

PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "faults.md"


def test_at_least_forty_distinct_faults() -> None:
    rows = every_fault()
    assert len({one.name for one in rows}) == len(rows) >= 40
    assert {one.part for one in rows} == set(Part)
    assert len({id(one.inject) for one in rows}) == len(rows)


def test_every_module_of_faults_is_in_the_table() -> None:
    found = {path.stem for path in Path(__file__).parent.glob("*_faults.py")}
    found.remove("test_faults")
    assert found == {module.__name__.rpartition(".")[2] for module in table.PLACES}


def test_the_docs_have_this_table() -> None:
    assert markdown().rstrip() in PAGE.read_text(encoding="utf-8")
    assert f"{len(every_fault())} faults" in PAGE.read_text(encoding="utf-8")
