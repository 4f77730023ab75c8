"""docs/papers.md leads from every item of the papers to code, tests and results that exist."""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "papers.md"
ABSENT = ("Not here: ", "Not reproduced: ")
"""The words before the reason why memopt lacks an item, or an experiment was not repeated."""


def up_to(last: int) -> list[str]:
    return [str(number) for number in range(1, last + 1)]


ITEMS = {
    "Rotor": {
        "equation": up_to(7),
        "algorithm": up_to(4),
        "figure": up_to(16),
        "table": up_to(2),
        "definition": ["3.1", "3.2", "3.3", "3.4", "3.5", "4.1", "4.2", "4.3"],
        "theorem": ["3.6", "4.7", "4.8"],
        "lemma": ["4.4", "4.6"],
        "corollary": ["4.5"],
    },
    "Offloading": {
        "equation": up_to(10),
        "algorithm": ["1"],
        "figure": up_to(19),
        "problem": up_to(2),
        "proposition": up_to(3),
        "lemma": up_to(3),
        "theorem": up_to(3),
    },
    "OLLA": {"equation": up_to(15), "function": up_to(5), "figure": up_to(14)},
    "MONeT": {
        "equation": up_to(16),
        "algorithm": up_to(2),
        "figure": up_to(7),
        "table": up_to(2),
        "appendix": ["A", "C", "D", "E", "F", "G", "H"],
    },
}
"""What the papers number, counted when they were read; appendix B is MONeT's eq. 10 to 14."""


@dataclass(frozen=True)
class Row:
    paper: str
    item: str
    code: str
    test: str
    remark: str


def rows(text: str) -> Iterator[Row]:
    """The rows of all tables, each with the heading that it stands under."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        paper = section.split("\n", 1)[0]
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| item |"):
                cells = [cell.strip() for cell in line[1:-1].split("|")]
                assert len(cells) == 4, line
                yield Row(paper, *cells)


def numbered(row: Row) -> Iterator[tuple[str, str]]:
    """(kind, number) of a row's items: "lemma 1, 2, theorem 2" are three."""
    kind = ""
    for part in row.item.split(", "):
        words = part.split()
        if len(words) == 2 and words[0].islower():
            kind, number = words
        else:
            number = part
        if re.fullmatch(r"\d+(\.\d+)?|[A-Z]", number):
            yield kind, number


def gone(row: Row) -> list[str]:
    """What a row names and the repository does not have."""
    missing = []
    for name in re.findall(r"`([^`]+)`", f"{row.code} {row.test} {row.remark}"):
        path, _, function = name.partition("::")
        if name.startswith("memopt."):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(name)
        elif path.startswith(("tests/", "benchmarks/")):
            there = (ROOT / path).is_file()
            if not there or (function and f"def {function}(" not in (ROOT / path).read_text()):
                missing.append(name)
    for link in re.findall(r"\]\(([^)#]+)", row.remark):
        if not (PAGE.parent / link).is_file():
            missing.append(link)
    return missing


ROWS = list(rows(PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("paper", ITEMS)
def test_every_item_of_a_paper_has_its_row(paper: str) -> None:
    found = Counter(one for row in ROWS if row.paper == paper for one in numbered(row))
    wanted = {(kind, number) for kind, numbers in ITEMS[paper].items() for number in numbers}
    assert set(found) == wanted
    assert [one for one, times in found.items() if times > 1] == []


def test_everything_that_is_named_is_there() -> None:
    assert {row.paper for row in ROWS} == set(ITEMS)
    assert [name for row in ROWS for name in gone(row)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.paper} {row.item}")
def test_a_row_has_code_and_a_test_or_the_reason_why_not(row: Row) -> None:
    absent = row.remark.startswith(ABSENT)
    assert absent or (row.code and row.test)
    if "benchmarks/" in row.code:
        assert absent or "](results/" in row.remark
    else:
        assert absent or "`memopt." in row.code


def test_what_is_gone_is_found() -> None:
    row = ROWS[0]
    for name in ("memopt.models.chain.Chains", "memopt.model.chain", "tests/nothing.py"):
        assert gone(Row("Rotor", "", f"`{name}`", "", "")) == [name]
    test = row.test.strip("`") + "::test_nothing"
    assert gone(Row("Rotor", "", "", f"`{test}`", "[page](results/nothing.md)")) == [
        test,
        "results/nothing.md",
    ]
