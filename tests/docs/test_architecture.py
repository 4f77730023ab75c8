"""What docs/architecture.md names is where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(\w+)(?:\.(\w+))?`(?: \(\w+\))? in\s+`(memopt/[\w/]+\.py)`", TEXT)


def names(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:memopt|tests)/[\w/]+\.py)`", TEXT))))
def test_files_are_there(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("name", "member", "path"), NAMED)
def test_names_are_in_their_files(name: str, member: str, path: str) -> None:
    assert (f"{name}.{member}" if member else name) in names(ROOT / path)


def test_every_room_is_drawn() -> None:
    assert len(NAMED) > 12
    for folder in sorted((ROOT / "memopt").iterdir()):
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert f'{folder.name}["{folder.name}' in TEXT
