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
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from enum import StrEnum
from types import CodeType, FunctionType, ModuleType

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


def _pytest(tests: Sequence[str]) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(pytest.main(["-x", "-q", "-m", "not slow", *plugins, *tests]))


def load(module: str, source: str) -> None:
    """From now on memopt's kernels load as plain Python, and the module from that source."""
    os.chdir(ROOT)
    sys.meta_path.insert(0, _Finder(module, source))


def plain(module: ModuleType) -> ModuleType:
    """A module of kernels as plain Python: itself if it is loaded so, else a second one."""
    if not any(hasattr(value, "py_func") for value in vars(module).values()):
        return module
    assert module.__file__ is not None
    other = ModuleType(module.__name__)
    loader = _Plain(module.__name__, module.__file__)
    loader.exec_module(other)
    return other


def passes(tests: Sequence[str]) -> bool:
    """Whether tests pass in this process, which stays loaded with what they have imported."""
    return _pytest(tests) == 0


def run(before: Callable[[], None], tests: Sequence[str], limit_s: int) -> tuple[Outcome, float]:
    """Run tests in a process forked from this one; (outcome, seconds of the processor).

    Args:
        before: what is done first in that process: `load` or `patch` with the mutant.
        tests: as pytest takes them, from the repository's root.
        limit_s: seconds of the processor that they may take.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            before()
            status = _pytest(tests)
        finally:
            os._exit(status)
    status = _waited(pid, 60 * limit_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return Outcome.TIME, seconds
    passed = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    return (Outcome.SURVIVED if passed else Outcome.KILLED), seconds


def patch(name: str, source: str) -> None:
    """Give the functions of a loaded module the code of another source, where they stand: those who
    imported them run the new code. What is not a function stays, but for the module's own numbers;
    a mutant that survives this is run again with `load`."""
    module = sys.modules[name]
    other = ModuleType(name)
    other.__file__ = module.__file__
    before = numba.config.DISABLE_JIT
    numba.config.DISABLE_JIT = 1
    try:
        exec(compile(source, str(module.__file__), "exec", dont_inherit=True), vars(other))
    finally:
        numba.config.DISABLE_JIT = before
    _exchange(vars(module), vars(other), name)


def _exchange(old: Mapping[str, object], new: Mapping[str, object], module: str) -> None:
    for name, value in new.items():
        known, fresh = _function(old.get(name)), _function(value)
        if known is not None and fresh is not None:
            if fresh.__module__ == module:
                known.__code__ = fresh.__code__
                known.__defaults__ = fresh.__defaults__
                known.__kwdefaults__ = fresh.__kwdefaults__
        elif isinstance(value, type) and value.__module__ == module:
            _exchange(vars(old[name]), vars(value), module)  # type: ignore[arg-type]  # a class
        elif isinstance(value, int | float) and isinstance(old, dict):
            old[name] = value


def _function(value: object) -> FunctionType | None:
    """The function of a method, a property or a decorated function."""
    for attribute in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, attribute, None) or value
    return value if isinstance(value, FunctionType) else None


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
