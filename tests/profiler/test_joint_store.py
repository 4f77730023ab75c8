"""The file of joint graphs: the user's alone, bounded, never in the way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from memopt.profiler.joint_store import LARGEST_GRAPH_BYTES, MOST_GRAPHS, JointStore
from tests.profiler.kept_joints import database


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")
def test_what_others_may_write_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor in a folder where they may put a journal, which would be played into the file."""
    store = JointStore(tmp_path)
    store.store("key", b"graph")
    file = database(tmp_path)
    for path, own, shared in ((file, 0o600, 0o660), (file.parent, 0o700, 0o777)):
        assert stat.S_IMODE(path.stat().st_mode) == own
        path.chmod(shared)
        assert store.load("key") is None
        assert "chmod go-w" in caplog.text
        path.chmod(own)
        assert store.load("key") == b"graph"
    if os.getuid() == 0:
        os.chown(file.parent, 12345, 12345)
        assert store.load("key") is None


def test_a_process_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MEMOPT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    store = JointStore()
    store.store("key", b"graph")
    assert store.load("key") is None


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = JointStore(tmp_path)
    for number in range(MOST_GRAPHS):
        store.store(f"{number}", b"graph")
    store.store("0", b"again")
    store.store("one more", b"graph")
    assert store.load("1") is None
    assert (store.load("0"), store.load("2"), store.load("one more")) == (
        b"again",
        b"graph",
        b"graph",
    )
    store.store("2", bytes(LARGEST_GRAPH_BYTES + 1))
    assert store.load("2") == b"graph"
