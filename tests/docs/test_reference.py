"""The documentation names everything public, and its pages hold what they promise."""

from __future__ import annotations

import inspect
import json
import re
import types
from pathlib import Path

import pytest

import memopt
from memopt.strategies import STRATEGIES

DOCS = Path(__file__).parent.parent.parent / "docs"
REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
NAMED = set(re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_every_public_name_is_in_the_reference() -> None:
    public = {
        f"memopt.{name}"
        for name, value in vars(memopt).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - NAMED == set()


def test_every_strategy_is_in_the_reference_and_on_a_page() -> None:
    classes = {f"{type(one).__module__}.{type(one).__qualname__}" for one in STRATEGIES}
    assert classes - NAMED == set()
    pages = "\n".join(page.read_text() for page in (DOCS / "strategies").glob("*.md"))
    assert [one.name for one in STRATEGIES if f"`{one.name}`" not in pages] == []


def test_every_public_method_has_a_docstring() -> None:
    bare = []
    for name, value in vars(memopt).items():
        if name.startswith("_") or not inspect.isclass(value):
            continue
        for member in vars(value):
            found = inspect.getattr_static(value, member)
            found = found.fget if isinstance(found, property) else found
            if member.startswith("_") or not inspect.isfunction(found):
                continue
            if not inspect.getdoc(found):
                bare.append(f"{name}.{member}")
    assert bare == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_belong_to_no_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 300_000
    assert not re.search(r"/(work|home|tmp|root|Users)/", text)
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    outputs = [one for cell in cells for one in cell.get("outputs", ())]
    assert all(one["output_type"] != "error" for one in outputs)
