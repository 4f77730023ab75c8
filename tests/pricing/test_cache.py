"""The profile cache: shared, durable, never in the way."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.pricing.cache import Cost, ProfileCache, default_directory

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


GOOD = '{"time_s": 0.25, "workspace_bytes": 128, "output_bytes": [4, 8]}'


def put(folder: Path, key: str, value: object) -> None:
    """Write a row as somebody who damages the file would."""
    (file,) = folder.glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT OR REPLACE INTO costs VALUES (?, ?)", (key, value))


ROWS: list[object] = [
    *("null", "[]", "7", '"text"', "", "{", "\x00", "NaN", "[" * 5000),
    *(GOOD.replace("0.25", time) for time in ("NaN", "-1", "Infinity", "1e999", "1e300", "null")),
    *(GOOD.replace("0.25", time) for time in ('"0.25"', "true", "1" + "0" * 400)),
    *(GOOD.replace("128", size) for size in ("-1", "1.5", "1e999", "NaN", str(2**60), "null")),
    *(GOOD.replace("[4, 8]", sizes) for sizes in ('"48"', "[-4]", "[NaN]", "{}", "[[4]]", "null")),
    *(GOOD.replace('"time_s"', name) for name in ('"time"', '"workspace_bytes"')),
    GOOD.replace("}", ', "more": 1}'),
    GOOD.replace("}", ', "time_s": 1}'),
    GOOD[:-5],
    b"\xff\xfe",
    17,
    2.5,
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row)[:50])
def test_a_bad_row_is_a_miss_and_is_replaced(tmp_path: Path, row: object) -> None:
    cache = ProfileCache(tmp_path)
    cache.store({"a": COST, "b": COST})
    put(tmp_path, "a", row)
    assert cache.load(["a", "b"]) == {"b": COST}
    cache.store({"a": COST})
    assert cache.load(["a", "b"]) == {"a": COST, "b": COST}


def test_flipped_bits_are_misses(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    rng = random.Random(0)
    for _ in range(200):
        row = bytearray(GOOD.encode())
        row[rng.randrange(len(row))] ^= 1 << rng.randrange(8)
        cache.store({"b": COST})
        put(tmp_path, "a", bytes(row))
        found = cache.load(["a", "b"])
        assert found["b"] == COST
        if "a" in found:
            sizes = (found["a"].workspace_bytes, *found["a"].output_bytes)
            assert 0 <= found["a"].time_s < 1e7
            assert all(0 <= size <= 2**53 for size in sizes)


def test_a_pipe_in_the_place_of_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ProfileCache(tmp_path)
    cache.store({"a": COST})
    (file,) = tmp_path.glob("*.sqlite")
    file.unlink()
    os.mkfifo(file)
    assert cache.load(["a"]) == {}
    cache.store({"a": COST})
    assert len(caplog.messages) == 1


def test_a_plan_after_damage_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    expected = memopt.plan(model, x, strategy="store-all", progress=False)
    (file,) = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection, connection:
        keys = [key for (key,) in connection.execute("SELECT key FROM costs")]
    assert any("baseline" in key for key in keys)
    zero = GOOD.replace("0.25", "0.0")
    for rows in (["null"], ["NaN", GOOD.replace("0.25", "-1")], [zero]):
        for i, key in enumerate(keys):
            put(tmp_path, key, rows[i % len(rows)])
        made = memopt.plan(model, x, strategy="store-all", progress=False)
        if rows != [zero]:
            assert made.peak_bytes == expected.peak_bytes
        known = ProfileCache().load(keys)
        assert len(known) == len(keys)


WRITER = """
import sys
from pathlib import Path
from memopt.pricing.cache import Cost, ProfileCache
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
