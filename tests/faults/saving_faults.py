"""Faults while plans are saved and loaded."""

from __future__ import annotations

import errno
import functools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import memopt
from memopt.api.plan import Plan
from memopt.errors import PlanFileError
from memopt.files import envelope
from memopt.models.instances import rotor_toy
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import AtLine, error_of, failing, fails_with

_OLD = "the old file is whole, and nothing lies beside it"
_SLEEPS_S = 60


@functools.cache
def plans() -> tuple[Plan, Plan]:
    """An old plan and a new one, of a cost model."""
    old, new = (memopt.plan(rotor_toy(), budget=b, strategy="rotor") for b in ("min", None))
    assert old.chain_steps != new.chain_steps
    return old, new


def is_plan(path: Path, plan: Plan) -> bool:
    return memopt.load(path).chain_steps == plan.chain_steps


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked process; its exit code, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        signal.alarm(_SLEEPS_S)
        code = 3
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(*_: Any, **__: Any) -> None:
    """As by the system when the memory is gone, or by a scheduler."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def no_more_than(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a full disk."""
    free, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))


def saved(room: Room) -> Path:
    path = room.folder / "plan.json"
    plans()[0].save(path)
    return path


def save_fails(room: Room, error: type[BaseException]) -> BaseException:
    """Save the new plan over the old one, which fails; the error."""
    path = room.folder / "plan.json"
    found = error_of(lambda: plans()[1].save(path))
    assert isinstance(found, error), found
    assert is_plan(path, plans()[0])
    assert list(room.folder.iterdir()) == [path]
    return found


def _killed_at(name: str, room: Room) -> int:
    path = saved(room)

    def work() -> None:
        setattr(os, name, killed)
        plans()[1].save(path)

    assert in_child(work) == -signal.SIGKILL
    assert is_plan(path, plans()[0])
    plans()[1].save(path)
    assert is_plan(path, plans()[1])
    return 1


for _what, _name in (
    ("killed before a plan is written", "fdopen"),
    ("killed while a plan is written to the disk", "fsync"),
    ("killed before a new plan takes the old one's place", "replace"),
):
    fault(Part.SAVING, f"a process is {_what}", "the old file is whole")(
        functools.partial(_killed_at, _name)
    )


@fault(Part.SAVING, "two processes save to one file at once", "the file is always one of the two")
def two_writers(room: Room) -> int:
    path = saved(room)
    children = []
    for plan in plans():
        child = os.fork()
        if child == 0:
            try:
                for _ in range(30):
                    plan.save(path)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        children.append(child)
    reads = 0
    while children:
        assert memopt.load(path).chain_steps in [plan.chain_steps for plan in plans()]
        reads += 1
        children = [one for one in children if os.waitpid(one, os.WNOHANG)[0] == 0]
    assert list(room.folder.iterdir()) == [path]
    return reads


@fault(Part.SAVING, "the disk is full while a plan is saved", f"OSError; {_OLD}")
def disk_full(room: Room) -> int:
    saved(room)
    whole = room.folder / "whole.json"
    plans()[1].save(whole)
    size_bytes = whole.stat().st_size
    whole.unlink()
    for limit in room.places(size_bytes - 1):
        with no_more_than(limit):
            save_fails(room, OSError)
    return 1


@fault(Part.SAVING, "the disk is full when a plan is flushed", f"OSError; {_OLD}")
def flush_fails(room: Room) -> int:
    saved(room)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    room.patch.setattr(os, "fsync", failing(os.fsync, 1, full))
    assert "No space left" in str(save_fails(room, OSError))
    return 1


@fault(Part.SAVING, "the folder is read-only", f"OSError; {_OLD}")
def read_only(room: Room) -> int:
    saved(room)
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    room.patch.setattr(os, "open", failing(os.open, 1, refused))
    assert "Read-only" in str(save_fails(room, OSError))
    return 1


@fault(Part.SAVING, "the disk fails while a plan is read", "PlanFileError that says so")
def read_error(room: Room) -> int:
    path = saved(room)
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    with room.patch.context() as patch:
        patch.setattr(os, "fstat", failing(os.fstat, 1, broken))
        fails_with(PlanFileError, "Input/output error", lambda: memopt.load(path))
    assert is_plan(path, plans()[0])
    return 1


@fault(Part.SAVING, "Ctrl-C at a line while a plan is saved", "the file is the old or the new one")
def interrupted_save(room: Room) -> int:
    path = saved(room)
    with AtLine() as count:
        plans()[0].save(path)
    happened = 0
    for number in room.places(count.seen, 6):
        plans()[0].save(path)
        try:
            with AtLine(number):
                plans()[1].save(path)
        except KeyboardInterrupt:
            happened += 1
        assert is_plan(path, plans()[0]) or is_plan(path, plans()[1])
        # The one line that removes what lies beside may itself be torn off.
        assert len(list(room.folder.glob("*"))) == 1, number
    return happened


@fault(Part.SAVING, "Ctrl-C at a line while a plan is loaded", "the file stays; it loads again")
def interrupted_load(room: Room) -> int:
    path = saved(room)
    with AtLine() as count:
        memopt.load(path)
    happened = 0
    numbers = range(1, count.seen, max(1, count.seen // (200 if room.everywhere else 4)))
    for number in numbers:
        try:
            with AtLine(number):
                memopt.load(path)
        except KeyboardInterrupt:
            happened += 1
    assert is_plan(path, plans()[0])
    return happened


@fault(
    Part.SAVING,
    "a folder, a pipe or a device is where a plan is to be",
    "PlanFileError at once; it stays as it is",
)
def no_file(room: Room) -> int:
    folder, pipe = room.folder / "folder", room.folder / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (folder, pipe, Path("/dev/null"), Path("/dev/zero")):
        for run in (lambda path=path: memopt.load(path), lambda path=path: plans()[0].save(path)):
            fails_with(PlanFileError, "cannot", run)
    assert folder.is_dir()
    assert pipe.is_fifo()
    return 4


@fault(Part.SAVING, "a file is larger than any plan, or grows", "PlanFileError; it is not read on")
def giant(room: Room) -> int:
    path = saved(room)
    with path.open("r+b") as file:
        file.truncate(2**40)
    fails_with(PlanFileError, "too many for a plan file", lambda: memopt.load(path))
    room.patch.setattr(envelope, "LARGEST_FILE_BYTES", 100)
    saved(room)
    fails_with(PlanFileError, "too many for a plan file", lambda: memopt.load(path))
    return 2
