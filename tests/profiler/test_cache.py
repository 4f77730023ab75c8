"""The profile cache: shared, durable, never in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memopt.profiler.cache import Cost, ProfileCache, default_directory

COST = Cost(0.25, 128, (4, 8))


def test_round_trip(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    assert cache.load(["a", "b"]) == {}
    cache.store({"a": COST})
    assert ProfileCache(tmp_path).load(["a", "b"]) == {"a": COST}
    cache.store({"a": Cost(0.5, 0, ())})
    assert cache.load(["a"])["a"].time_s == 0.5


def test_many_keys(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    costs = {f"key {i}": Cost(float(i), i, (i,)) for i in range(2000)}
    cache.store(costs)
    assert cache.load(list(costs)) == costs


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"\xff" * 200])
def test_unreadable_file_is_an_empty_cache(tmp_path: Path, content: bytes) -> None:
    cache = ProfileCache(tmp_path)
    cache.store({"a": COST})
    (file,) = [path for path in tmp_path.iterdir() if path.suffix == ".sqlite"]
    file.write_bytes(content)
    assert cache.load(["a"]) == {}
    cache.store({"a": COST})


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ProfileCache(tmp_path / "file")
    cache.store({"a": COST})
    assert cache.load(["a"]) == {}


def test_folder_is_chosen_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen"
    monkeypatch.delenv("MEMOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "memopt"


WRITER = """
import sys
from pathlib import Path
from memopt.profiler.cache import Cost, ProfileCache
cache = ProfileCache(Path(sys.argv[1]))
for i in range(50):
    cache.store({f"{sys.argv[2]} {i}": Cost(float(i), i, (i,)), "shared": Cost(1.0, 1, (1,))})
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "ab"
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    keys = [f"{name} {i}" for name in "ab" for i in range(50)]
    assert len(ProfileCache(tmp_path).load([*keys, "shared"])) == 101
