"""Ranks that are not alike, or that end: one clear error on every rank, and no hang."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import memopt
from memopt.errors import (
    CaptureError,
    ExecutionError,
    InfeasibleBudgetError,
    PlanFileError,
    RankError,
)
from memopt.executor.in_step import InStep
from memopt.executor.installed import Installed
from memopt.executor.undo import Changes
from memopt.step.rank_groups import RankGroup
from memopt.strategies.store_all import StoreAll
from tests.distributed import cases, processes

TIMEOUT_S = 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def told(call: Any, errors: Any = (RankError, InfeasibleBudgetError)) -> str:
    """The text of the error of a call, with its notes."""
    with pytest.raises(errors) as caught:
        call()
    notes = getattr(caught.value, "__notes__", [])
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *notes])


class Failing(StoreAll):
    """A strategy with a defect."""

    def solve(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a defect")


class Raising(torch.nn.Module):
    """A model whose forward, or whose capture, fails on one rank."""

    def __init__(self, inner: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.how == "raises":
            raise KeyError("not on this rank")
        if self.how == "reads":
            input = input * math.erf(input.detach().max().item())
        found: torch.Tensor = self.inner(input)
        return found


ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "strategy": ("rotor", "store-all"),
    "time_limit_s": (1.0, 2.0),
    "order": (False, True),
    "place": (False, True),
    "kernels": ("aten", "all"),
    "device": (None, "H100"),
}
"""Argument of `memopt.plan` → what two ranks name."""


def told_of_all(rank: int, ranks: int) -> dict[str, str]:
    """What each rank is told for ways to disagree that are met before anything runs, or while it is
    captured, planned and applied."""
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}

    def shard(model: Any, **options: Any) -> Any:
        return memopt.shard(model, mesh, **options)

    model = shard(cases.mlp())
    inputs = cases.batch(model)

    def plan(one: Any = model, given: Any = inputs, **named: Any) -> Any:
        return memopt.plan(one, given, progress=False, **named)

    for name, values in ARGUMENTS.items():
        found[name] = told(partial(plan, **{name: values[rank]}))
    for name, values in {
        "param_dtype": (None, torch.bfloat16),
        "reduce_dtype": (None, torch.float64),
        "bucket_bytes": (0, 2**20),
    }.items():
        found[name] = told(partial(shard, cases.mlp(), **{name: values[rank]}))
    places = [None, lambda one: Shard(one.dim() - 1)]
    found["placement"] = told(partial(shard, cases.mlp(), shard_placement_fn=places[rank]))
    with mock.patch.object(memopt, "__version__", f"0.{rank}"):
        found["version"] = told(plan)
    values = inputs["input"]
    others = {
        "input's dtype": values.double(),
        "input's gradient": values.clone().requires_grad_(),
        "input's strides": values.t().contiguous().t(),
        "keyword": {"input": values, "more": values},
        "value": {"input": values, "flag": rank},
    }
    for what, given in others.items():
        found[what] = told(partial(plan, given=given if rank else inputs))
    other = cases.mlp()
    other[0].register_parameter("more", torch.nn.Parameter(torch.ones(rank + 1)))
    found["parameter"] = told(partial(shard, other))
    named = torch.nn.Sequential(OrderedDict([(f"layer{rank}", torch.nn.Linear(4, 4))]))
    found["name"] = told(partial(shard, named))
    kinds = (torch.nn.GELU, torch.nn.ReLU)
    found["code"] = told(partial(plan, shard(torch.nn.Sequential(cases.mlp(), kinds[rank]()))))
    sides = (torch.nn.Dropout(0.5), torch.nn.Dropout(0.5).eval())
    found["mode"] = told(partial(plan, shard(torch.nn.Sequential(cases.mlp(), sides[rank]))))
    for how in ("raises", "reads"):
        one = Raising(cases.mlp(), how if rank else "")
        found[how] = told(partial(plan, shard(one)), (RankError, CaptureError))
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(rank)):
        found["autocast"] = told(plan)
    both = (RankError, ZeroDivisionError)
    found["defect"] = told(partial(plan, strategy=Failing()), both)
    fails = mock.patch("memopt.stages.stages.agreed_graph", side_effect=MemoryError("no room"))
    with fails if rank else contextlib.nullcontext():
        found["memory"] = told(plan, (RankError, MemoryError))
    found["elsewhere"] = told(partial(shard, cases.mlp()) if rank else plan)
    made = plan()
    shorter = shard(cases.mlp()[:-1])
    applied = partial(made.apply, shorter if rank else model)
    found["applied"] = told(applied, (RankError, PlanFileError))
    return found


@pytest.mark.slow
def test_whatever_differs_is_told_on_every_rank(tmp_path: Path) -> None:
    first, second = processes.results(processes.run(told_of_all, 2, tmp_path, timeout_s=300))
    assert first.keys() == second.keys()
    own = {"raises": "CaptureError", "reads": "CaptureError", "memory": "MemoryError"}
    own["applied"] = "PlanFileError"
    for what, text in first.items():
        other = second[what]
        if what in own:
            assert other.startswith(own[what]), (what, other)
            assert text.startswith("RankError: rank 1 failed while"), (what, text)
            assert other.endswith(text.removeprefix("RankError: ")), (what, text, other)
        elif what == "defect":
            assert text.startswith("ZeroDivisionError: a defect"), text
            assert other.startswith("RankError: rank 0 failed while rank 0 plans"), other
            assert text.endswith(other.removeprefix("RankError: ")), (text, other)
        elif what == "elsewhere":
            assert text == other
            assert "the ranks are at different places" in text
        else:
            assert text == other, what
            assert text.startswith("RankError: "), (what, text)
            assert "Every rank must run the same script" in text or "another step" in text, text


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
    """What ranks leave for one another, without any; each has its own."""

    all_said: list[tuple[int, str]] = field(default_factory=list)
    group: RankGroup = field(default_factory=lambda: RankGroup((0, 1), {}))
    members = (0, 1)

    def report_failure(self, what: str, step: int = 0) -> str:
        self.all_said.append((step, f"rank 1 {what}"))
        return self.all_said[-1][1]

    def reported_failure(self) -> tuple[int, str] | None:
        return next(reversed(self.all_said), None)


def in_step(word: Word) -> InStep:
    """Another rank of a step, which hears the word."""
    own: Any = Word(word.all_said)
    return InStep(own)


def failing(error: BaseException) -> Installed:
    """A program both halves of which fail."""

    def run(*_: object) -> None:
        raise error

    return Installed(run, run, (), ())


LOST = RuntimeError("[gloo/transport] Connection closed by peer")


def test_a_failure_in_a_step_is_told_and_no_other_step_runs() -> None:
    word = Word()
    alone = mock.patch("memopt.step.rank_errors.last_failure_alone", return_value=None)
    waiting = "another rank is gone, or did not answer.*padded to the same shapes"
    with alone, pytest.raises(RankError, match=waiting):
        in_step(word).installed(failing(LOST)).forward([])
    for error in (MemoryError("no memory"), KeyboardInterrupt("no memory")):
        here = in_step(word)
        broken = here.installed(failing(error))
        with pytest.raises(type(error), match="no memory") as caught:
            broken.backward([], [], [])
        another = InStep(here.ranks).installed(failing(error))  # of another kind of call
        for one in (broken, another):
            with pytest.raises(ExecutionError, match="the ranks are not in step any more"):
                one.forward([])
        told = f"rank 1 failed in the backward of a planned step: {type(error).__name__}: no memory"
        assert caught.value.__notes__[-1] == f"{told}. The step is over on every rank"
        there = in_step(word)
        for _ in range(2):  # the second time as the reason for not running
            with pytest.raises((RankError, ExecutionError), match=told):
                there.installed(failing(LOST)).backward([], [], [])


def test_what_a_rank_was_told_is_no_failure_of_its_own() -> None:
    word = Word()
    word.report_failure("failed: KeyError: 1")
    with pytest.raises(RankError, match="at different places"):
        in_step(word).installed(failing(RankError("at different places"))).forward([])
    assert word.reported_failure() == (0, "rank 1 failed: KeyError: 1")


def test_a_check_that_fails_on_a_rank_is_told() -> None:
    def look(outputs: list[Any]) -> None:
        raise ExecutionError(f"a check fails: {outputs}")

    word = Word()
    checking = in_step(word).installed(replace(failing(LOST), look=look))
    with pytest.raises(ExecutionError, match=r"a check fails: \[1\]"):
        checking.look([1])
    with pytest.raises(RankError, match=r"rank 1 failed in the forward of a planned step.*a check"):
        in_step(word).installed(failing(LOST)).forward([])


def test_a_rank_that_has_done_a_step_that_failed_elsewhere_is_told_so() -> None:
    word = Word()
    here, there = in_step(word), in_step(word)
    with pytest.raises(ValueError, match="late"), here.whole_step(Changes(1, 0)):
        raise ValueError("late")
    with there.whole_step(Changes(1, 0)):
        pass
    told = "rank 1 failed in a planned step: ValueError: late. This rank had done that step"
    with pytest.raises(RankError, match=told), there.whole_step(Changes(1, 0)):
        there.installed(failing(LOST)).forward([])
    # Ctrl-C that has waited for the end of a step leaves a rank that may go on.
    with pytest.raises(KeyboardInterrupt), in_step(word).whole_step(Changes(1, 0, complete=True)):
        raise KeyboardInterrupt
    assert word.reported_failure() == (2, "rank 1 ended: KeyboardInterrupt")


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
    found = processes.run(mid_step, 4, tmp_path, "killed", timeout_s=TIMEOUT_S, lost=1)
    for text, unchanged, seconds in (found[0], found[2], found[3]):
        assert text.startswith("RankError: another rank is gone")
        # Of those that are there some may wait for others, and not for the one that is gone.
        waited = r"ranks? 1(, \d)? gave no sign yet; .* waited while the backward of a planned step"
        assert re.search(waited, text)
        assert text == found[0][0]
        assert unchanged
        assert seconds < 1.5 * TIMEOUT_S


def elsewhere(rank: int, ranks: int) -> str:
    """Rank 1 has a batch of another shape, which it plans while the others run theirs."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = memopt.wrap(memopt.shard(cases.mlp(), mesh), "min", progress=False)
    cases.train(model, model, rank, 2)
    batch = cases.batch(model)
    if rank == 1:
        batch = {name: one[:-3] for name, one in batch.items()}
    return told(lambda: cases.loss_of(model(**batch)).backward(), RankError)


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_say_where(tmp_path: Path) -> None:
    found = processes.results(processes.run(elsewhere, 3, tmp_path, timeout_s=TIMEOUT_S))
    assert len(set(found)) == 1, found
    waited = r"ranks 0, 2 waited while the forward of a planned step runs; rank 1 waited while"
    assert re.search(rf"did not answer in time: {waited} .*padded to the same shapes", found[0])


@pytest.mark.slow
def test_a_rank_does_not_answer(tmp_path: Path) -> None:
    # Planning has the same timeout, also on a busy machine.
    found = processes.run(mid_step, 2, tmp_path, "silent", timeout_s=TIMEOUT_S)
    assert isinstance(found[0], tuple), found
    text, unchanged, seconds = found[0]
    assert text.startswith("RankError: another rank is gone, or did not answer in time")
    assert unchanged
    assert seconds < 1.5 * TIMEOUT_S
