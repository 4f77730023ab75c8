"""Faults of what memopt keeps on disk for the next process: profiled costs, plans of wrapped
models, finished cells of comparisons. None of it may stop or change a training."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

import memopt
from memopt.api.plan import Plan
from memopt.files import plan_store
from memopt.files.plan_store import PlanStore
from memopt.models import folders
from memopt.models.instances import rotor_toy
from memopt.pricing.cache import Cost, ProfileCache
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import failing, fails_with
from tests.faults.saving_faults import in_child, killed, no_more_than, plans

_GO_ON = "it is made anew, once, and what cannot be kept is said once"
COST = Cost(0.25, 128, (4, 8))
KEY = "key"


class Made:
    """Makes plans, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Plan:
        self.count += 1
        return plans()[0]


def gets(store: PlanStore, kept: bool) -> None:
    """A store gives the plan, from disk or made once."""
    made = Made()
    found, was_there = store.get(KEY, made)
    assert found.chain_steps == plans()[0].chain_steps
    assert (was_there, made.count) == (kept, 0 if kept else 1)


def file_of(room: Room) -> Path:
    return room.folder / "plans-v1" / f"{KEY}.json"


def _damaged(damage: Callable[[Path], object], room: Room) -> int:
    store = PlanStore(room.folder)
    gets(store, kept=False)
    gets(store, kept=True)
    damage(file_of(room))
    gets(store, kept=False)
    gets(store, kept=True)
    return 1


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


for _what, _damage in {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "damaged by a bit": _flip,
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93."),
}.items():
    fault(Part.KEPT, f"a kept plan is {_what}", "it is made anew and takes that one's place")(
        functools.partial(_damaged, _damage)
    )


@fault(Part.KEPT, "a folder stands where a plan is kept", _GO_ON)
def folder_in_the_way(room: Room) -> int:
    file_of(room).mkdir(parents=True)
    gets(PlanStore(room.folder), kept=False)
    return 1


def cannot_be_used(room: Room, breaks: Callable[[], contextlib.AbstractContextManager[Any]]) -> int:
    """A store that cannot be written makes the plan once, and again the next time."""
    told: list[str] = []
    room.patch.setattr(folders._LOG, "warning", lambda text, *rest: told.append(text % rest))
    for _ in range(2):
        with breaks():
            gets(PlanStore(room.folder), kept=False)
    assert len(told) == 1, told
    gets(PlanStore(room.folder), kept=False)
    gets(PlanStore(room.folder), kept=True)
    return 2


@fault(Part.KEPT, "the disk is full while a plan is kept", _GO_ON)
def store_full(room: Room) -> int:
    return cannot_be_used(room, lambda: no_more_than(100))


@fault(Part.KEPT, "the folder of kept plans is read-only", _GO_ON)
def store_read_only(room: Room) -> int:
    @contextlib.contextmanager
    def breaks() -> Any:
        with room.patch.context() as patch:
            refused = OSError(errno.EROFS, os.strerror(errno.EROFS))

            def broken(*_: Any, **__: Any) -> Any:
                raise refused

            patch.setattr(plan_store, "save", broken)
            yield

    return cannot_be_used(room, breaks)


@fault(Part.KEPT, "a stale plan lies in a read-only folder", "a new one is made and used")
def stale_read_only(room: Room) -> int:
    store = PlanStore(room.folder)
    gets(store, kept=False)
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    room.patch.setattr(plan_store, "save", failing(plan_store.save, 1, refused))
    made = Made()
    assert store.renew(KEY, made).chain_steps == plans()[0].chain_steps
    assert made.count == 1
    return 1


@fault(Part.KEPT, "planning fails while its lock is held", "its own error, once; the lock is free")
def make_fails(room: Room) -> int:
    store = PlanStore(room.folder)
    calls = []

    def make() -> Plan:
        calls.append(1)
        raise OSError("injected: in planning")

    fails_with(OSError, "in planning", lambda: store.get(KEY, make))
    assert len(calls) == 1
    gets(store, kept=False)
    return 1


@fault(Part.KEPT, "a process is killed while it plans", "the next one does not wait for its lock")
def killed_planning(room: Room) -> int:
    assert in_child(lambda: PlanStore(room.folder).get(KEY, killed)) == -signal.SIGKILL
    begin = time.monotonic()
    gets(PlanStore(room.folder), kept=False)
    assert time.monotonic() - begin < 30
    return 1


@fault(
    Part.KEPT,
    "a process is killed while it keeps a plan",
    "the next one makes it anew; what was left half-written goes after a day",
)
def killed_keeping(room: Room) -> int:
    def work() -> None:
        os.fsync = killed  # type: ignore[assignment]
        gets(PlanStore(room.folder), kept=False)

    assert in_child(work) == -signal.SIGKILL
    (left,) = file_of(room).parent.glob(f"{folders.UNFINISHED}*")
    gets(PlanStore(room.folder), kept=False)
    assert left.exists()
    two_days_ago = time.time() - 2 * 86400
    os.utime(left, (two_days_ago, two_days_ago))
    file_of(room).unlink()
    gets(PlanStore(room.folder), kept=False)
    assert not left.exists()
    return 1


@fault(Part.KEPT, "two processes want the same plan at once", "one makes it, the other waits")
def two_planners(room: Room) -> int:
    file_of(room).parent.mkdir()
    marks = room.folder / "made"

    def make() -> Plan:
        with marks.open("a", encoding="ascii") as file:
            file.write("x")
        time.sleep(0.2)
        return plans()[0]

    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = (
                    PlanStore(room.folder).get(KEY, make)[0].chain_steps != plans()[0].chain_steps
                )
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert marks.read_text() == "x"
    return 1


@fault(Part.KEPT, "another process holds a plan's lock for ever", _GO_ON)
def locked(room: Room) -> int:
    room.patch.setattr(plan_store, "_PATIENCE_S", 0.05)
    file_of(room).parent.mkdir()
    with FileLock(f"{file_of(room)}.lock"):
        gets(PlanStore(room.folder), kept=False)
    gets(PlanStore(room.folder), kept=True)
    return 1


def cache_works(cache: ProfileCache) -> None:
    cache.store({"a": COST, "b": COST})
    assert cache.load(["a", "b", "c"]) == {"a": COST, "b": COST}


def sqlite_file(room: Room) -> Path:
    (file,) = room.folder.glob("*.sqlite")
    return file


@fault(Part.KEPT, "a process is killed while it writes costs", "those from before are there")
def killed_writing(room: Room) -> int:
    cache = ProfileCache(room.folder)
    cache_works(cache)

    class Writing(sqlite3.Connection):
        def executemany(self, sql: str, rows: Any) -> Any:
            super().executemany(sql, rows)
            killed()

    def work() -> None:
        real = sqlite3.connect
        sqlite3.connect = functools.partial(real, factory=Writing)  # type: ignore[assignment]
        cache.store({f"n{number}": COST for number in range(1000)})

    assert in_child(work) == -signal.SIGKILL
    assert cache.load(["a", "n1", "n999"]) == {"a": COST}
    cache_works(cache)
    return 1


@fault(Part.KEPT, "two processes write costs at once", "all of them are there")
def two_caches(room: Room) -> int:
    cache = ProfileCache(room.folder)
    cache_works(cache)
    children = []
    for name in "xyz":
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for number in range(10):
                    cache.store({f"{name}{number}": COST})
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert len(cache.load([f"{name}{number}" for name in "xyz" for number in range(10)])) == 30
    return 3


def _content(content: Callable[[bytes], bytes], room: Room) -> int:
    cache = ProfileCache(room.folder)
    cache_works(cache)
    file = sqlite_file(room)
    file.write_bytes(content(file.read_bytes()))
    # Whatever is found is a cost, and nothing fails.
    for cost in cache.load(["a", "b"]).values():
        assert 0 <= cost.time_s <= 1e6
    cache.store({"a": COST})
    return 1


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    for place in random.Random(0).sample(range(len(data)), 200):
        changed[place] ^= 1 << (place % 8)
    return bytes(changed)


for _what, _change in {
    "cut off": lambda data: data[: len(data) // 2],
    "damaged by bits": _flipped,
    "empty": lambda _: b"",
    "no database": lambda _: b"\x80\x04pickle" * 100,
}.items():
    fault(Part.KEPT, f"the file of profiled costs is {_what}", "what it lacks is measured again")(
        functools.partial(_content, _change)
    )


@fault(Part.KEPT, "the disk is full while costs are written", "nothing is kept; it is said once")
def cache_full(room: Room) -> int:
    told: list[str] = []
    room.patch.setattr(folders._LOG, "warning", lambda text, *rest: told.append(text % rest))
    cache = ProfileCache(room.folder)
    cache_works(cache)
    with no_more_than(100):
        for _ in range(2):
            cache.store({f"n{number}": COST for number in range(1000)})
    assert len(told) == 1, told
    assert cache.load(["a", "n1"]) == {"a": COST}
    return 2


@fault(Part.KEPT, "the folder of costs cannot be made", "nothing is kept; planning goes on")
def cache_folder(room: Room) -> int:
    (room.folder / "file").write_text("in the way")
    cache = ProfileCache(room.folder / "file")
    cache.store({"a": COST})
    assert cache.load(["a"]) == {}
    return 1


@fault(Part.KEPT, "another process holds the costs locked", "they are measured; nothing fails")
def cache_locked(room: Room) -> int:
    cache = ProfileCache(room.folder)
    cache_works(cache)
    real = sqlite3.connect
    with contextlib.closing(real(sqlite_file(room))) as other:
        other.execute("BEGIN EXCLUSIVE")
        room.patch.setattr(sqlite3, "connect", lambda path, timeout: real(path, timeout=0.05))
        assert cache.load(["a"]) == {}
        cache.store({"c": COST})
        other.rollback()
    cache_works(cache)
    return 1


def _cells(damage: Callable[[Path], object], room: Room) -> int:
    room.patch.setenv("MEMOPT_CACHE_DIR", str(room.folder))

    def compared() -> list[Any]:
        made = memopt.compare(rotor_toy(), strategies=["rotor"], budgets=[0.8], progress=False)
        return [(cell.status, cell.plan and cell.plan.chain_steps) for cell in made.cells]

    expected = compared()
    cells = [*(room.folder / "cells-v1").glob("*.json")]
    assert cells
    for path in cells:
        damage(path)
    assert compared() == expected
    return len(cells)


for _what, _damage in {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "of other plans": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"budget_bytes":', b'"budget_bytes":9')
    ),
}.items():
    fault(Part.KEPT, f"kept cells of a comparison are {_what}", "they are solved again")(
        functools.partial(_cells, _damage)
    )


@fault(Part.KEPT, "the disk is full while cells are kept", "the comparison goes on; said once")
def cells_full(room: Room) -> int:
    room.patch.setenv("MEMOPT_CACHE_DIR", str(room.folder))
    told: list[str] = []
    room.patch.setattr(folders._LOG, "warning", lambda text, *rest: told.append(text % rest))
    with no_more_than(100):
        made = memopt.compare(rotor_toy(), strategies=["rotor"], budgets=[0.8, 0.9], progress=False)
    assert all(cell.plan is not None for cell in made.cells)
    assert len(told) == 1, told
    return 1
