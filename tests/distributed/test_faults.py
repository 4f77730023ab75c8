"""Ranks that are not alike, or that end: one clear error on every rank, and no hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import memopt
from memopt.errors import ExecutionError, InfeasibleBudgetError, PlanFileError, RankError
from memopt.executor.in_step import InStep
from memopt.executor.runtime import Installed
from tests.distributed import cases, processes

TIMEOUT_S = 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def told(call: Any) -> str:
    """The text of the error of a call."""
    with pytest.raises((RankError, InfeasibleBudgetError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def different(rank: int, ranks: int, file: str) -> dict[str, str]:
    """Ranks plan together with something that differs; what each of them is told."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = memopt.shard(cases.mlp(), mesh)
    inputs = cases.batch(model)
    found = {}

    def plan(one: Any = model, budget: Any = None, given: Any = inputs) -> memopt.Plan:
        return memopt.plan(one, given, budget=budget, progress=False)

    other = torch.nn.Sequential(*cases.mlp()[rank:])
    found["sharded model"] = told(lambda: memopt.shard(other, mesh))
    other = memopt.shard(cases.mlp(), mesh)
    other[rank].requires_grad_(False)
    found["model"] = told(lambda: plan(other))
    found["budget"] = told(lambda: plan(budget=10_000_000 + rank))
    found["inputs"] = told(lambda: plan(given={"input": torch.randn(64 + rank, 16)}))
    found["beyond"] = told(lambda: plan(budget=1000))
    with mock.patch.object(torch, "__version__", f"2.{13 + rank}.0"):
        found["torch"] = told(plan)
    if rank == 0:
        found["one fails"] = told(plan)
    else:
        with (
            mock.patch("memopt.profiler.session.measure", side_effect=OSError("disk")),
            pytest.raises(OSError, match="disk"),
        ):
            plan()
    with pytest.raises(ValueError, match="several ranks hold this model"):
        memopt.profile(model, inputs, progress=False)
    made = plan(budget="min")
    kept = plan()
    # Plans that differ are not applied together.
    found["plan"] = told(lambda: (made if rank else kept).apply(model))
    if rank == 0:
        made.save(file)
    return found


@pytest.mark.slow
def test_ranks_that_differ(tmp_path: Path) -> None:
    file = tmp_path / "two.plan"
    found = processes.results(processes.run(different, 2, tmp_path, str(file), timeout_s=TIMEOUT_S))
    for one in found:
        assert "do not have the same model" in one["sharded model"]
        assert "do not have the same model" in one["model"]
        assert "do not have the same budget: rank 0 has 10000000, rank 1 has" in one["budget"]
        assert "do not have the same inputs" in one["inputs"]
        assert "do not have the same torch version: rank 0 has 2.13.0" in one["torch"]
        assert one["beyond"].startswith("InfeasibleBudgetError")
        assert re.search(r"do not have the same plan: .* peak of .*; at instruction", one["plan"])
    assert found[0]["one fails"].endswith("OSError: disk")
    # A plan of two ranks, here with one.
    with pytest.raises(PlanFileError, match=r"over 2 rank\(s\), this one is over 1"):
        memopt.load(file).apply(cases.mlp())


@dataclass
class Word:
    """What ranks leave for one another, without any."""

    text: str | None = None

    def report_failure(self, doing: str) -> None:
        self.text = f"rank 1 failed {doing}"

    def reported_failure(self) -> str | None:
        return self.text


def test_a_failure_in_a_step_is_told_and_no_other_step_runs() -> None:
    word: Any = Word()
    here, there = InStep(word), InStep(word)

    def failing(error: Exception) -> Callable[..., Any]:
        def run(*_: object) -> None:
            raise error

        return run

    def program(error: Exception) -> Installed:
        return Installed(failing(error), failing(error), (), ())

    lost = program(RuntimeError("[gloo/transport] Connection closed by peer"))
    with pytest.raises(RankError, match="another rank is gone, or did not answer"):
        InStep(word).installed(lost).forward([])
    broken = here.installed(program(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        broken.backward([], [], [])
    with pytest.raises(ExecutionError, match="the ranks are not in step any more"):
        broken.forward([])
    told = r"rank 1 failed in the backward of a planned step: MemoryError: no memory\. The step is"
    with pytest.raises(RankError, match=told):
        there.installed(lost).backward([], [], [])


def mid_step(rank: int, ranks: int, how: str) -> tuple[str, bool, float]:
    """Rank 1 ends, or fails, between its forward and the end of its backward."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = memopt.wrap(memopt.shard(cases.mlp(), mesh), "min", progress=False)
    cases.train(model, model, rank, 1)
    before = [value.clone() for value in cases.own(model)]
    loss = cases.loss_of(model(**cases.batch(model)))
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "silent":
            time.sleep(2 * TIMEOUT_S)
        loss.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("no memory")))
    begin = time.monotonic()
    try:
        loss.backward()
    except (RankError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    seconds = time.monotonic() - begin
    untouched = cases.same(before, cases.own(model))
    return text, untouched and all(p.grad is None for p in model.parameters()), seconds


@pytest.mark.slow
def test_a_rank_is_killed(tmp_path: Path) -> None:
    found = processes.run(mid_step, 2, tmp_path, "killed", timeout_s=TIMEOUT_S, lost=1)
    text, unchanged, seconds = found[0]
    assert text.startswith("RankError: another rank is gone")
    assert unchanged
    assert seconds < TIMEOUT_S


@pytest.mark.slow
def test_a_rank_does_not_answer(tmp_path: Path) -> None:
    # Planning has the same timeout, also on a busy machine.
    found = processes.run(mid_step, 2, tmp_path, "silent", timeout_s=TIMEOUT_S)
    assert isinstance(found[0], tuple), found
    text, unchanged, seconds = found[0]
    assert text.startswith("RankError: another rank is gone, or did not answer in time")
    assert unchanged
    assert seconds < 1.5 * TIMEOUT_S
