"""The oldest files of a folder go, and their locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memopt.models.folders import UNFINISHED, default_directory, drop_oldest, tell_once


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


def test_what_was_left_half_written_goes_after_a_day(folder: Path) -> None:
    old, new = folder / f"{UNFINISHED}old", folder / f"{UNFINISHED}new"
    old.touch()
    new.touch()
    os.utime(old, (1000, 1000))
    drop_oldest(folder, 5)
    assert (old.exists(), new.exists()) == (False, True)


def test_the_folder_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", "/kept")
    assert default_directory() == Path("/kept")
    monkeypatch.delenv("MEMOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home")
    assert default_directory() == Path("/home/memopt")


def test_a_place_that_cannot_be_used_is_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        tell_once("cache", folder, "written", OSError("full"))
    assert [record.getMessage() for record in caplog.records] == [
        f"the cache {folder} cannot be written: full"
    ]
