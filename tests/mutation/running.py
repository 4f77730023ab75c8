"""One mutant after another, each in a process of its own that has loaded what is not memopt's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from enum import StrEnum
from types import CodeType, ModuleType

import numba
import pytest

from tests.layers import ROOT

MEMORY_BYTES = 6 * 2**30
"""Address space of a mutant's process: one that asks for more has failed."""


class Outcome(StrEnum):
    """What became of a mutant: a test failed, its time or memory ran out, or nobody noticed."""

    KILLED = "killed"
    TIME = "out of time"
    SURVIVED = "survived"


class _Plain(importlib.machinery.SourceFileLoader):
    """Loads a module of memopt with its kernels as plain Python."""

    def exec_module(self, module: ModuleType) -> None:
        before = numba.config.DISABLE_JIT
        numba.config.DISABLE_JIT = 1
        try:
            super().exec_module(module)
        finally:
            numba.config.DISABLE_JIT = before


class _Mutated(_Plain):
    """The same, from another source than the file's."""

    source = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "memopt" and not fullname.startswith("memopt."):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        if found is not None and found.origin is not None and found.origin.endswith(".py"):
            found.loader = _Plain(fullname, found.origin)
            if fullname == self.module:
                found.loader = mutated = _Mutated(fullname, found.origin)
                mutated.source = self.source
        return found


def _child(module: str, source: str, tests: Sequence[str], limit_s: int) -> int:
    """pytest's exit status, in the forked process."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.meta_path.insert(0, _Finder(module, source))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(pytest.main(["-x", "-q", "-m", "not slow", *plugins, *tests]))


def run(module: str, source: str, tests: Sequence[str], limit_s: int) -> tuple[Outcome, float]:
    """Run tests with a module's source exchanged; (outcome, seconds of the processor).

    Args:
        module: dotted name.
        source: what it is instead.
        tests: as pytest takes them, from the repository's root.
        limit_s: seconds of the processor that they may take.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.chdir(ROOT)
            status = _child(module, source, tests, limit_s)
        finally:
            os._exit(status)
    status = _waited(pid, 30 * limit_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return Outcome.TIME, seconds
    passed = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    return (Outcome.SURVIVED if passed else Outcome.KILLED), seconds


def _waited(pid: int, wall_s: float) -> int:
    """The exit status of a child, killed if it takes longer than that."""
    end = time.monotonic() + wall_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.02)
