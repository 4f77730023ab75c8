"""What docs/architecture.md names is where it says."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import memopt

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(\w+)(?:\.(\w+))?`(?: \(\w+\))? in\s+`(memopt/[\w/]+\.py)`", TEXT)

WALK = [
    f"memopt/{room}/{path}"
    for room, files in re.findall(
        r"^1\. `memopt/(\w+)/`: (.*?)(?=\n1\.|\n\n)",
        TEXT.partition("## The way of the data")[2].partition("\n## ")[0],
        re.MULTILINE | re.DOTALL,
    )
    for path in re.findall(r"`([\w/]+\.py)`", files)
]
"""The files that make or change the data of a plan, in turn."""
RETURNED_TO = {"api", "reductions"}
"""Rooms that the walk comes back to, as the page says."""


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


def test_the_walk_is_short_and_returns_to_no_other_room() -> None:
    assert 20 < len(WALK) <= 30
    assert len(set(WALK)) == len(WALK)
    rooms = [room for room, _ in itertools.groupby(WALK, lambda path: path.split("/")[1])]
    assert {room for room in rooms if rooms.count(room) > 1} == RETURNED_TO


def test_a_plan_and_a_step_run_every_file_of_the_walk() -> None:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    inputs = torch.randn(2, 4)
    installed = Path(memopt.__file__).parent.parent
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        module = memopt.plan(model, inputs, strategy="rotor", progress=False).apply(model)
        module(inputs).sum().backward()
    finally:
        sys.setprofile(before)
    assert [path for path in WALK if str(installed / path) not in entered] == []
