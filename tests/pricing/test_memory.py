"""The memory meter: what it counts, and what a kernel's workspace is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memopt.errors import ProfilerBusyError
from memopt.pricing import baseline, one_session
from memopt.pricing.cache import ProfileCache
from memopt.pricing.measure import MeasureOptions
from memopt.pricing.memory import (
    LossMeter,
    MemoryUse,
    cpu_profile,
    library_bytes,
    metered,
    metered_sections,
)
from memopt.profiler.session import profile_model
from memopt.profiler.step_session import profile_step
from memopt.step.backend import backend_of
from memopt.step.loss import Loss
from memopt.step.profiled import ProfiledStep

CPU = torch.device("cpu")


def test_ranges_of_the_caller_are_not_recorded() -> None:
    """One that outlasts its profile would write to freed memory, if another profile runs then."""
    with cpu_profile() as profiler, torch.profiler.record_function("the caller's"):
        torch.ones(8)
    names = {one.name() for one in profiler.kineto_results.events()}
    assert "aten::ones" in names
    assert "the caller's" not in names


def test_the_callers_profile_is_not_ended() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        with pytest.raises(ProfilerBusyError, match="plan first"), metered(CPU):
            pass
        torch.ones(8)
    assert "aten::ones" in {event.key for event in profile.key_averages()}


def test_peak_and_end() -> None:
    with metered(CPU) as use:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        c = torch.empty(200, dtype=torch.uint8)
    assert (use.peak_bytes, use.end_bytes) == (1500, 700)
    del b, c


OPEN_AT_EXIT = """
import torch
from memopt.pricing.memory import LossMeter
meter = LossMeter(torch.device("cpu"), print)
torch.ones(3)
"""


def test_python_exits_between_a_forward_and_its_backward() -> None:
    """Torch's profiler, still open then, is a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", OPEN_AT_EXIT], timeout=300, check=False)
    assert done.returncode == 0


def test_what_was_there_before_does_not_count() -> None:
    before = torch.empty(400, dtype=torch.uint8)
    with metered(CPU) as use:
        del before
        after = torch.empty(100, dtype=torch.uint8)
    assert (use.peak_bytes, use.end_bytes) == (100, 100)
    del after


def test_what_an_earlier_meter_saw_does_not_count() -> None:
    with metered(CPU):
        before = torch.empty(400, dtype=torch.uint8)
    with metered(CPU) as use:
        after = torch.empty(100, dtype=torch.uint8)
        del before
        more = torch.empty(300, dtype=torch.uint8)
    assert (use.peak_bytes, use.end_bytes) == (400, 400)
    del after, more


@pytest.mark.parametrize(("peaks", "alone", "least"), [("9787", False, 7), ("98", True, 9)])
def test_ranks_take_the_least_peak_that_they_meet_twice(
    peaks: str, alone: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = iter(map(int, peaks))
    use = lambda _: contextlib.nullcontext(MemoryUse(next(met)))  # noqa: E731
    monkeypatch.setattr(baseline, "metered", use)
    monkeypatch.setattr(baseline, "alone", lambda: alone)
    device = torch.device("cpu")
    assert baseline._peak_bytes(lambda: None, lambda: None, device) == least
    assert len(list(met)) == alone


def test_failing_block() -> None:
    with pytest.raises(ZeroDivisionError), metered(CPU):
        _ = 1 / 0
    with metered(CPU) as use:
        kept = torch.empty(64, dtype=torch.uint8)
    assert use.end_bytes == 64
    del kept


def test_sections_are_apart() -> None:
    def temporary() -> torch.Tensor:
        scratch = torch.empty(1000, dtype=torch.uint8)
        result = torch.empty(10, dtype=torch.uint8)
        del scratch
        return result

    def prepare() -> Callable[[], torch.Tensor]:
        prepared = torch.empty(5000, dtype=torch.uint8)
        return lambda: prepared[:77].clone()

    uses = metered_sections(CPU, [lambda: temporary, prepare, lambda: temporary])
    assert [(u.peak_bytes, u.end_bytes) for u in uses] == [(1010, 10), (77, 77), (1010, 10)]


def test_what_libraries_keep_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the allocator counts before and after cuBLAS gives its workspaces back."""
    counted = [500]
    runtime = backend_of("cuda").runtime
    monkeypatch.setattr(runtime, "synchronize", lambda _device: None)
    monkeypatch.setattr(runtime, "memory_allocated", lambda _device: counted[0])
    monkeypatch.setattr(
        torch._C,
        "_cuda_clearCublasWorkspaces",
        lambda: counted.__setitem__(0, 436),
        raising=False,
    )
    assert library_bytes(torch.device("cuda", 0)) == 64
    assert library_bytes(torch.device("cuda", 0)) == 0
    assert library_bytes(CPU) == 0


def test_what_libraries_keep_is_resident(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured with the unplanned step, and remembered with it."""
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    plain = profile_model(model, x, options=MeasureOptions())
    monkeypatch.setattr("memopt.pricing.baseline.library_bytes", lambda _device: 1000)
    options = MeasureOptions(cache=ProfileCache(tmp_path))
    for _ in range(2):
        charged = profile_model(model, x, options=options)
        assert charged.graph.resident_bytes == plain.graph.resident_bytes + 1000
        assert charged.baseline.peak_bytes == plain.baseline.peak_bytes + 1000
        monkeypatch.setattr("memopt.profiler.session.measure_baseline", None)


def test_what_libraries_keep_in_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def profiled() -> ProfiledStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return profile_step(model, x, loss=Loss(torch.sum), optimizer=optimizer)

    plain = profiled()
    monkeypatch.setattr("memopt.pricing.baseline.library_bytes", lambda _device: 1000)
    charged = profiled()
    assert charged.graph.resident_bytes == plain.graph.resident_bytes + 1000
    assert charged.baseline.peak_bytes == plain.baseline.peak_bytes + 1000


def test_one_thread_at_a_time_has_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once crash torch: the second one waits for the first, or is told that it is busy."""
    cpu, said = torch.device("cpu"), []

    def other() -> None:
        said.append(LossMeter.possible(cpu))
        try:
            with metered(cpu):
                said.append("measured")
        except ProfilerBusyError:
            said.append("busy")

    def in_a_thread(meter_s: float) -> None:
        thread = threading.Thread(target=other)
        with metered(cpu):
            thread.start()
            thread.join(meter_s)
        thread.join()

    in_a_thread(0.05)
    monkeypatch.setattr(one_session, "WAIT_S", 0.0)
    in_a_thread(5.0)
    assert said == [False, "measured", False, "busy"]
