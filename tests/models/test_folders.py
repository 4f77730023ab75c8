"""The oldest files of a folder go, and their locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memopt.models.folders import drop_oldest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for age in range(5):
        for name in (f"{age}.json", f"{age}.json.lock"):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (1000 - age, 1000 - age))
    return tmp_path


def test_the_newest_stay_with_their_locks(folder: Path) -> None:
    drop_oldest(folder, 5)
    assert len(list(folder.iterdir())) == 10
    drop_oldest(folder, 2)
    left = {path.name for path in folder.iterdir()}
    assert left == {"0.json", "0.json.lock", "1.json", "1.json.lock"}


def test_another_process_may_drop_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is gone when it is looked at is no error: a plan would be made twice."""
    listed = list(folder.glob("*.json"))
    (folder / "4.json").unlink()
    monkeypatch.setattr(Path, "glob", lambda *_: iter(listed))
    drop_oldest(folder, 3)
    assert {path.name for path in folder.iterdir() if path.suffix == ".json"} == {
        "0.json",
        "1.json",
        "2.json",
    }
