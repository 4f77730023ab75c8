"""Settings of the whole test run."""

from __future__ import annotations

import os
import tempfile

# Before torch, matplotlib and transformers are imported: one thread per worker, no window, no hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One profile cache for the run, shared by its workers, which inherit the variable; in memory where
# there is room for it, since thousands of commits would each wait for a disk.
if "MEMOPT_CACHE_DIR" not in os.environ:
    _memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    _profile_cache = tempfile.TemporaryDirectory(prefix="memopt-tests-", dir=_memory)
    os.environ["MEMOPT_CACHE_DIR"] = _profile_cache.name

# And one of compiled kernels, which takes a compiler seconds for each.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _inductor_cache = tempfile.TemporaryDirectory(prefix="memopt-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name

import functools
import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell's background jobs ignore Ctrl-C, and what they start does, too: tests send themselves one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No wall-clock limits per example (machines differ), and the same examples in every run. To look
# for new ones: HYPOTHESIS_PROFILE=explore.
settings.register_profile(
    "memopt", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow]
)
# Of tests/fuzz: `ci` in every run, `long` by `make fuzz`.
settings.register_profile("ci", settings.get_profile("memopt"), max_examples=25)
settings.register_profile("long", settings.get_profile("explore"))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "memopt"))


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """Millions of objects live as long as torch and transformers do; collections, of which the
    tests of what a step keeps ask for many, need not look at them again."""
    gc.freeze()
    yield
    gc.collect()


@functools.cache
def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def pytest_report_header() -> str:
    """One line that says what becomes of the tests that need a GPU."""
    if has_cuda():
        return "gpu tests: on the CUDA device of this machine"
    return "gpu tests: deselected, no CUDA device here"


SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().split("\n"))
"""Tests that take seconds and have quicker ones beside them, by their ids."""


@pytest.hookimpl(tryfirst=True)  # before xdist's, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect gpu tests where there is no GPU, unless tests are only listed; keep one model family
    and one file on one worker; mark as slow what `slow.txt` lists."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    if not (has_cuda() or config.option.collectonly):
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        if gpu:
            config.hook.pytest_deselected(items=gpu)
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    # Captures, fixtures and imports are kept per process: a family's tests, or else a file's, share
    # theirs on one worker. xdist begins with the largest groups, so that the workers end together.
    for item in items:
        group = _family_name(item)
        if group is None and item.get_closest_marker("xdist_group") is None:
            group = item.nodeid.partition("::")[0]
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The groups of `--dist loadgroup` are in force: xdist names them after an @."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = (item for item in session.items if item.get_closest_marker("xdist_group"))
        if not all("@" in item.nodeid for item in grouped):
            raise pytest.UsageError("xdist_group has no effect with this pytest and this xdist")


def _family_name(item: pytest.Item) -> str | None:
    parameters = getattr(item, "callspec", None)
    if parameters is None or "family" not in parameters.params:
        return None
    family = parameters.params["family"]
    return str(getattr(family, "name", family))
