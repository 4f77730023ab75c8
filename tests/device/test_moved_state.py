"""Whole steps on the device whose parameters and state are moved: updates on the host, and failures
of steps that leave tensors there for the next."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memopt.errors import ExecutionError
from memopt.executor.recorder import DeviceClock, Recorder
from memopt.executor.swap_streams import DeviceStreams, StreamSwap
from memopt.programs.moved import updates_on_host
from memopt.strategies.offload.graph import OffloadGraph
from tests.device.harness import DELAYS, delayed, settled
from tests.device.test_steps import LOSS, SLOW, Whole

MOVED = {"strategy": "offload-graph", "budget": 0.65, "movable": "all"}
HOST = dataclasses.replace(SLOW, host_update_bytes_per_s=5e9)


@functools.lru_cache(1)
def repeated() -> Whole:
    one = Whole({**MOVED, "steady_state": True, "device": SLOW}, rows=8, undo=True)
    assert one.step._homes.carried
    return one


def everything(one: Whole) -> list[torch.Tensor]:
    """Parameters and state, on the host."""
    settled()
    state = one.optimizer.state
    found = [p.detach() for p in one.model.parameters()]
    found += [value for p in one.model.parameters() for value in state[p].values()]
    return [value.cpu().clone() for value in found]


def test_updates_on_the_host(device: torch.device) -> None:
    """The host's fused step rounds otherwise: equal but for the last bits, whatever is late."""
    strategy = OffloadGraph(exact_only=False)
    one = Whole({**MOVED, "strategy": strategy, "device": HOST}, rows=8)
    assert len(updates_on_host(one.plan.graph, one.plan.program)) > 1
    for seed, most in enumerate(DELAYS):
        with delayed(most):
            one.run(seed)
        one.expected(seed)
    settled()
    for found, wanted in zip(one.model.parameters(), one.twin.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-5, atol=1e-7)


def test_what_is_on_the_host_stays_there(device: torch.device) -> None:
    swap, seed = StreamSwap(DeviceStreams(device), 0, device=device), torch.tensor(5)
    copy = swap.out(seed)
    assert swap.bring(copy) is seed
    saved = [seed, copy]
    assert swap.fork(saved) is saved
    assert Recorder(DeviceClock(device)).take() == ()


def failing(plain: Any, fails: Callable[..., bool], early: bool = True) -> Any:
    """The method, which fails in some calls, before it has done anything or after."""

    def method(*given: Any, **named: Any) -> Any:
        now = fails(*given)
        if now and early:
            raise RuntimeError("it failed")
        found = plain(*given, **named)
        if now:
            raise RuntimeError("it failed")
        return found

    return method


def failing_update(one: Whole, early: bool) -> Any:
    """The optimizer's step, which fails for a parameter whose state is moved."""
    wanted = next(iter(one.step._homes.states.values()))

    def fails(optimizer: torch.optim.Optimizer) -> bool:
        return any(p is wanted for group in optimizer.param_groups for p in group["params"])

    return failing(torch.optim.AdamW.step, fails, early)


def check_taken_back(one: Whole, seed: int, what: Any, name: str, method: Any) -> None:
    """A step that fails leaves all as it was, whatever is late, and the next one is right."""
    before = everything(one)
    with pytest.MonkeyPatch.context() as patch, delayed((100, 300)):
        patch.setattr(what, name, method)
        with pytest.raises(RuntimeError, match="it failed"):
            one.run(seed)
    assert all(map(torch.equal, everything(one), before))
    with delayed((100, 300)):
        one.run(seed + 1)
    one.expected(seed + 1)
    assert one.differs() == []


@pytest.mark.parametrize("what", ["bring", "store", "wait"])
def test_a_failing_transfer(what: str, device: torch.device) -> None:
    """No update of the step before is lost; with several that fail, at its end, too."""
    one = repeated()
    one.run(7)
    one.expected(7)
    for numbers in ((1,), (2,), (5,), range(4, 99)):
        calls = itertools.count(1)
        fails = functools.partial(lambda calls, numbers, *_: next(calls) in numbers, calls, numbers)
        method = failing(getattr(StreamSwap, what), fails)
        check_taken_back(one, 8, StreamSwap, what, method)


@pytest.mark.parametrize("early", [True, False])
def test_a_failing_update(early: bool, device: torch.device) -> None:
    one = repeated()
    one.run(3)
    one.expected(3)
    check_taken_back(one, 4, torch.optim.AdamW, "step", failing_update(one, early))


@pytest.mark.parametrize("what", ["update", "late update", "copy"])
def test_a_first_step_that_fails(what: str, device: torch.device) -> None:
    """Before it there is no state, and after it none. (A second step of a model had its moved
    parameters from the first on the host, and read them there.)"""
    one = repeated()
    for optimizer in (one.optimizer, one.eager):
        optimizer.state.clear()
    one.step = one.plan.train_step(one.model, LOSS, one.optimizer, undo=True)
    before = [p.detach().cpu() for p in one.model.parameters()]
    made = len(one.optimizer.state)

    def fails(*_: Any) -> bool:
        """A copy to the host once there is state: its first."""
        return len(one.optimizer.state) > made

    with pytest.MonkeyPatch.context() as patch:
        if what == "copy":
            patch.setattr(StreamSwap, "out", failing(StreamSwap.out, fails))
        else:
            patch.setattr(torch.optim.AdamW, "step", failing_update(one, what == "update"))
        with pytest.raises(RuntimeError, match="it failed"):
            one.run(5)
    settled()
    assert all(map(torch.equal, [p.detach().cpu() for p in one.model.parameters()], before))
    assert not any(one.optimizer.state.values())
    one.run(6)
    one.expected(6)
    assert one.differs() == []


@pytest.mark.parametrize("what", ["update", "out", "wait"])
def test_a_first_step_that_fails_and_is_not_taken_back(what: str, device: torch.device) -> None:
    """What it has updated is the eager step's, and on the host, as is the state that it made."""
    one = repeated()
    for optimizer in (one.optimizer, one.eager):
        optimizer.state.clear()
    one.step = one.plan.train_step(one.model, LOSS, one.optimizer)
    with torch.no_grad():
        for own, other in zip(one.model.parameters(), one.twin.parameters(), strict=True):
            other.copy_(own)
    before = [p.detach().cpu().clone() for p in one.model.parameters()]
    failed = list[bool]()

    def fails(*_: Any) -> bool:
        """The first copy once there is state, or wait for one."""
        now = bool(one.optimizer.state) and not failed
        failed.extend([True] * now)
        return now

    with pytest.MonkeyPatch.context() as patch:
        if what == "update":
            patch.setattr(torch.optim.AdamW, "step", failing_update(one, early=True))
        else:
            patch.setattr(StreamSwap, what, failing(getattr(StreamSwap, what), fails))
        with pytest.raises(ExecutionError, match="restore a checkpoint"):
            one.run(5)
    one.expected(5)
    settled()
    updated = 0
    for old, own, other in zip(before, one.model.parameters(), one.twin.parameters(), strict=True):
        state = one.optimizer.state.get(own) or {}
        assert torch.equal(own.cpu(), other.cpu() if state else old)
        updated += bool(state)
        for key, value in state.items():
            assert torch.equal(value.cpu(), one.eager.state[other][key].cpu())
    assert 0 < updated < len(before)
    assert all(value.device.type == "cpu" for value in one.step._homes._views.values())
