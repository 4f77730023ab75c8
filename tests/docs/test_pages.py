"""Guides stay short, and name only files and code that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_instruction_dispatch import EVERY_KIND

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
MOST_WORDS = 26_000
"""Of README and guides, as `wc -w` counts them."""
TABLES = ("docs/papers.md",)
"""Pages whose words are not counted: tables of names to look things up in, no prose to read."""
NO_GUIDES = ("results", "history", "gallery", "explorer", "notebooks")
"""Folders of measured, dated and generated pages."""

GUIDES = sorted(
    page
    for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
    if not set(NO_GUIDES) & set(page.relative_to(ROOT).parts)
)
FOREIGN = {
    "AccumulateGrad",
    "GLOO_SOCKET_IFNAME",
    "MemPool",
    "attach_mine",
    "change_current_allocator",
    "compute_loss",
    "gaussian_nll_loss",
    "memory_stats",
}
"""Names of torch's, of trainers' and of examples that no file of this repository speaks of."""


def spoken_of(text: str) -> list[str]:
    """What is between backticks in a line."""
    fenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", fenced)


@cache
def words_of_code() -> set[str]:
    """Every identifier in the repository's Python files, its command lines and its settings."""
    found: set[str] = set()
    for folder in ("memopt", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"[A-Za-z_]\w+", path.read_text(encoding="utf-8")))
    for name in ("pyproject.toml", "Makefile"):
        found |= set(re.findall(r"[A-Za-z_]\w+", (ROOT / name).read_text(encoding="utf-8")))
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_no_hint_names_a_package_that_no_index_has() -> None:
    """memopt is on no package index: a hint names the packages that an extra stands for."""
    wrong = [
        str(path.relative_to(ROOT))
        for folder in ("memopt", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".ipynb"} and "history" not in path.parts
        if re.search(r"pip install '?memopt", path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_guides_have_few_words() -> None:
    counts = {
        named(page): len(page.read_text(encoding="utf-8").split())
        for page in GUIDES
        if named(page) not in TABLES
    }
    longest = sorted(counts.items(), key=lambda one: -one[1])[:5]
    assert sum(counts.values()) <= MOST_WORDS, f"the longest: {longest}"


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_files_that_a_guide_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"\b((?:memopt|tests|benchmarks|examples|docs)/[\w/.-]*\w)", text))
    missing = {one for one in paths if not (ROOT / one).exists()}
    assert missing == set()


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_names_that_a_guide_speaks_of_are_in_the_code(page: Path) -> None:
    """Identifiers with an underscore or a capital inside: others are words of English as well."""
    missing = set()
    for text in spoken_of(page.read_text(encoding="utf-8")):
        for word in re.findall(r"(?<![\w/-])[A-Za-z_]\w*(?:_|[a-z][A-Z])\w+", text):
            if word not in words_of_code() | FOREIGN:
                missing.add(word)
    assert missing == set()


def test_the_places_of_a_new_instruction_are_those_that_are_counted() -> None:
    text = (DOCS / "adding.md").read_text(encoding="utf-8").partition("## An instruction")[2]
    steps = re.findall(r"^\d\. `(memopt/[\w/]+)\.py`", text, re.MULTILINE)
    assert {one.replace("/", ".") for one in steps} == EVERY_KIND


def test_stale_names_are_found() -> None:
    assert spoken_of("a `b.c` d\n```\n`e`\n```\n`f`\n") == ["b.c", "f"]
    assert "captured_as_in_no_file_" + "here" not in words_of_code()
