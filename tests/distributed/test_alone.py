"""One rank alone fails, ends or is slow while ranks plan: the others are told, and do not wait for
it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

import memopt
from memopt.step.ranks import ranks_of
from tests.distributed import cases, processes

TIMEOUT_S = 15
MARGIN_S = 5


def ends(call: Callable[[], Any]) -> str:
    """How a call ends, in one sentence; "": as it should."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (told to the test)
        return f"{type(error).__name__}: {error}"
    return ""


def raising(*_: Any, **__: Any) -> Any:
    raise KeyError("here alone")


class Summed(nn.Module):
    """Communicates in its forward, and holds no DTensors: its ranks are known from its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.broken = nn.Linear(16, 16), False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raising()
        found: torch.Tensor = all_reduce(self.layer(input), "sum", torch.distributed.group.WORLD)
        return found


class Cut(nn.Module):
    """Trains nothing, if its output is cut off."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.layers, self.cut = cases.mlp(), cut

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(input)
        return found.detach() if self.cut else found


PLANNED: dict[str, dict[str, Any]] = {
    "budget": {"budget": "plenty"},
    "host budget": {"host_budget": -1},
    "strategy": {"strategy": "no such"},
    "time limit": {"time_limit_s": -1.0},
    "mode": {"mode": "guess"},
    "device": {"device": "Z80"},
    "micro-batches": {"micro_batches": 0},
    "clipping": {"clip_norm": -1.0},
    "movable": {"movable": "nothing"},
    "progress": {"progress": raising},
    "inputs": {"inputs": object()},
}
"""Arguments of `memopt.plan` that one rank alone has."""

WRAPPED: dict[str, dict[str, Any]] = {
    "wrap's budget": {"budget": "plenty"},
    "wrap's targets": {"loss_fn": nn.functional.mse_loss, "targets": raising},
    "wrap's optimizer": {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)},
    "wrap's parts": {"parts": "no such"},
}
"""Arguments of `memopt.wrap` that one rank alone has."""

SHARDED: dict[str, dict[str, Any]] = {
    "bucket": {"bucket_bytes": -1},
    "placement": {"shard_placement_fn": raising},
}
"""Arguments of `memopt.shard` that one rank alone has."""


def alone(rank: int, ranks: int) -> dict[str, str]:
    """How each rank ends where rank 1 alone has an argument that it cannot take."""
    mesh = init_device_mesh("cpu", (ranks,))
    model: nn.Module = memopt.shard(cases.mlp(), mesh)
    inputs = cases.batch(model)
    found = {}

    def plan(one: nn.Module = model, **named: Any) -> memopt.Plan:
        return memopt.plan(
            one, named.pop("inputs", inputs), **{"progress": False, "strategy": "store-all"} | named
        )

    def first_call(make: Callable[[], nn.Module], **named: Any) -> None:
        one = make()
        memopt.wrap(one, progress=False, **named)
        one(**inputs)

    def here(given: dict[str, Any]) -> dict[str, Any]:
        return given if rank == 1 else {}

    def summed(broken: bool = False) -> nn.Module:
        one = Summed()
        one.broken = broken
        return one

    for what, given in PLANNED.items():
        found[what] = ends(partial(plan, **here(given)))
    for what, given in WRAPPED.items():
        found[what] = ends(
            partial(first_call, lambda: memopt.shard(cases.mlp(), mesh), **here(given))
        )
    for what, given in SHARDED.items():
        found[what] = ends(partial(memopt.shard, cases.mlp(), mesh, **here(given)))
    made = plan()
    found["applied"] = ends(partial(made.apply, model, **here({"on_mismatch": "no such"})))
    found["applied to"] = ends(partial(made.apply, model, **here({"inputs": object()})))
    found["of the graph, wrapped"] = ends(partial(first_call, summed, **here({"budget": "plenty"})))
    found["of the graph, captured"] = ends(lambda: plan(summed(broken=rank == 1)))
    found["of the graph"] = ends(lambda: plan(summed(), **here({"budget": "plenty"})))
    # Of a kind that they have met: a new model, whose ranks one that fails has not found.
    found["of the graph, again"] = ends(partial(first_call, partial(summed, broken=rank == 1)))
    found["detached"] = ends(partial(first_call, lambda: memopt.shard(Cut(rank == 1), mesh)))
    half = memopt.shard(cases.mlp(), mesh).requires_grad_(rank == 0)
    found["places: frozen"] = ends(partial(first_call, lambda: half))
    # All alike: nobody waits for anybody, and nobody is told of an earlier failure.
    found["alike"] = ends(lambda: plan(budget="plenty"))
    found["right"] = ends(lambda: plan().apply(model)(**inputs).sum().backward())
    # What the others read from their caches this rank measures: all measure.
    found["right, without a cache"] = ends(partial(plan, **here({"cache": False})))
    damaged = mock.patch("memopt.pricing.measure.difference", side_effect=["a row", None])
    with damaged if rank == 1 else contextlib.nullcontext():
        found["right, a cache is damaged"] = ends(plan)
    found["right, of the graph"] = ends(lambda: plan(summed()).apply(summed())(**inputs))
    return found


def in_a_step(rank: int, ranks: int) -> str:
    """How a rank ends where the loss fails on rank 1 alone, between collectives
    of the step itself."""
    model = memopt.shard(cases.mlp(), init_device_mesh("cpu", (ranks,)))
    loss_fn = raising if rank else torch.sum
    return ends(lambda: memopt.plan(model, cases.batch(model), loss_fn=loss_fn, progress=False))


def loaded(rank: int, ranks: int, path: str) -> tuple[str, float]:
    """How a rank ends, and after how many seconds, where one of them cannot read the plan."""
    model = memopt.shard(cases.mlp(), init_device_mesh("cpu", (ranks,)))
    plan = memopt.plan(model, cases.batch(model), strategy="store-all", progress=False)
    if rank == 0:
        plan.save(path)
    torch.distributed.barrier()
    begin_s = time.monotonic()
    text = ends(lambda: memopt.load(path if rank == 0 else f"{path} elsewhere").apply(model))
    took_s = time.monotonic() - begin_s
    if rank == 1:
        time.sleep(TIMEOUT_S + MARGIN_S)
    return text, took_s


@pytest.mark.slow
def test_a_plan_is_loaded_on_one_rank_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    run = processes.run(loaded, 2, tmp_path, path, timeout_s=TIMEOUT_S)
    (text, took_s), (other, _) = processes.results(run)
    assert other.startswith("PlanFileError: cannot read ")
    assert text.startswith("RankError: another rank is gone, or did not answer in time")
    assert text.endswith(f"Before that, rank 1 failed while a plan is loaded: {other}")
    assert took_s < TIMEOUT_S + MARGIN_S


@pytest.mark.slow
def test_a_loss_fails_on_one_rank(tmp_path: Path) -> None:
    run = processes.run(in_a_step, 2, tmp_path, timeout_s=TIMEOUT_S)
    text, other = processes.results(run)
    assert other == "KeyError: 'here alone'"
    assert text == f"RankError: rank 1 failed while the step is profiled: {other}"


@pytest.mark.slow
def test_what_one_rank_cannot_take_ends_all(tmp_path: Path) -> None:
    # Nobody may wait: the timeout is longer than the test has time for.
    first, second = processes.results(processes.run(alone, 2, tmp_path, timeout_s=3600))
    assert first.keys() == second.keys()
    for what, text in first.items():
        other = second[what]
        if what.startswith("right"):
            assert (text, other) == ("", ""), what
        elif what.startswith("places"):
            assert text == other, what
            planned = "what is met around a step is charged"
            assert f"on rank 0 {planned}, on rank 1 a call has nothing to train" in text
        elif what == "detached":
            assert text == other, what
            assert "rank 1 failed while the step is profiled: NothingToTrainError" in text
        elif what == "alike":
            assert text == other, what
            assert text.startswith("ValueError: "), what
        else:
            assert other, what
            assert not other.startswith("RankError: "), (what, other)
            assert text.startswith("RankError: rank 1 failed while "), (what, text)
            if what == "of the graph, again":  # the wrapped model runs, and raises its own error
                assert f"without memopt it fails, too ({other})" in text
            else:
                assert text.endswith(other), (what, text, other)


Phase = Callable[[Callable[[], None]], contextlib.AbstractContextManager[Any]]


def _before(name: str) -> Phase:
    """A context in which something happens before a function of memopt is called."""
    module, _, function = name.rpartition(".")

    def entered(happens: Callable[[], None]) -> Any:
        original = getattr(__import__(module, fromlist=[function]), function)

        def late(*args: Any, **kwargs: Any) -> Any:
            happens()
            return original(*args, **kwargs)

        return mock.patch(name, late)

    return entered


@contextlib.contextmanager
def _at_once(happens: Callable[[], None]) -> Iterator[None]:
    happens()
    yield


PHASES: dict[str, tuple[int, Phase]] = {
    "begin": (1, _at_once),
    "measure": (1, _before("memopt.profiler.session.measure")),
    "solve": (0, _before("memopt.api.solving.solve")),
    "apply": (1, _before("memopt.executor.apply.install")),
}
"""Phase of planning → the rank that is missing in it, and how it gets there."""


def missing(rank: int, ranks: int, phase: str, happens: str) -> tuple[str, float, float]:
    """How a rank ends where one does not come on in a phase; when it ended, and since when the
    other one did not come (by the clock of the machine)."""
    who, where = PHASES[phase]
    model = memopt.shard(cases.mlp(), init_device_mesh("cpu", (ranks,)))
    inputs, since = cases.batch(model), [0.0]
    group = ranks_of(model)
    assert group is not None
    group.exchanged(None, "the ranks begin")

    def do() -> None:
        since[0] = time.monotonic()
        if happens == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT_S + 2 * MARGIN_S)

    def run() -> None:
        plan = memopt.plan(model, inputs, strategy="store-all", progress=False)
        plan.apply(model)

    with where(do) if rank == who else contextlib.nullcontext():
        text = ends(run)
    return text, time.monotonic(), since[0]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_slow_while_planning(phase: str, tmp_path: Path) -> None:
    run = processes.run(missing, 3, tmp_path, phase, "silent", timeout_s=TIMEOUT_S)
    found = processes.results(run)
    who = PHASES[phase][0]
    waited = [one for rank, one in enumerate(found) if rank != who]
    assert len({text for text, _, _ in waited}) == 1, waited
    assert waited[0][0].startswith("RankError: another rank is gone, or did not answer in time")
    for _, ended_s, _ in waited:
        assert ended_s - found[who][2] < TIMEOUT_S + MARGIN_S
    # The one that comes late is told why the others are gone.
    assert found[who][0] == waited[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_killed_while_planning(phase: str, tmp_path: Path) -> None:
    who = PHASES[phase][0]
    # Nobody waits for the timeout.
    found = processes.run(missing, 3, tmp_path, phase, "killed", timeout_s=3600, lost=who)
    waited = [one for rank, one in enumerate(found) if rank != who]
    assert len({text for text, _, _ in waited}) == 1, waited
    assert waited[0][0].startswith("RankError: another rank is gone")
