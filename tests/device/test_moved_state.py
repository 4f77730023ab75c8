"""Whole steps on the device whose parameters and state are moved: updates on the host, tensors that
a step leaves there for the next, and failures."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import memopt
from memopt.executor.swap_streams import StreamSwap
from memopt.programs.moved import updates_on_host
from memopt.strategies.offload.graph import OffloadGraph
from tests.device import accelerator
from tests.device.harness import DELAYS, delayed, settled
from tests.device.test_steps import Whole

MOVED = {"strategy": "offload-graph", "budget": 0.65, "movable": "all"}
SLOW = memopt.Device(to_host_bytes_per_s=1e5)
"""So slow that it pays to leave something on the device, or to let the host update it."""
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


def test_what_a_step_leaves_on_the_device(device: torch.device) -> None:
    one = repeated()
    for seed, most in enumerate(DELAYS):
        with delayed(most):
            before = accelerator.counts()[2]
            one.run(seed)
            waits = accelerator.counts()[2] - before
        one.expected(seed)
        assert seed == 0 or waits <= 1
    assert one.differs() == []
    assert one.step.host_bytes > 0


def test_updates_on_the_host(device: torch.device) -> None:
    """The host's fused step rounds otherwise: equal to the last bits, and the same bits whatever is
    late."""

    def trained(*delays: tuple[int, int]) -> Whole:
        one = Whole({**MOVED, "strategy": OffloadGraph(exact_only=False), "device": HOST}, rows=8)
        assert len(updates_on_host(one.plan.graph, one.plan.program)) > 1
        for seed, most in enumerate(delays):
            with delayed(most):
                one.run(seed)
        return one

    one, late = trained(*[(0, 0)] * len(DELAYS)), trained(*DELAYS)
    assert all(map(torch.equal, everything(one), everything(late)))
    for seed in range(len(DELAYS)):
        one.expected(seed)
    settled()
    for found, wanted in zip(one.model.parameters(), one.twin.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("what", ["bring", "store", "wait"])
def test_a_failing_transfer(
    what: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has failed, no update of the step before is lost, and the next step is right."""
    one = repeated()
    one.run(7)
    one.expected(7)
    plain = getattr(StreamSwap, what)
    for number in (1, 2, 5):
        before, calls = everything(one), 0

        def failing(self: StreamSwap, *given: Any, at: int = number) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("a transfer")
            return plain(self, *given)

        with monkeypatch.context() as patch, delayed((100, 300)):
            patch.setattr(StreamSwap, what, failing)
            with pytest.raises(RuntimeError, match="a transfer"):
                one.run(8)
        assert all(map(torch.equal, everything(one), before)), number
        with delayed((100, 300)):
            one.run(9)
        one.expected(9)
        assert one.differs() == [], number


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_failing_update(
    late: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which nothing stays, whether its numbers were there already or not."""
    one = repeated()
    one.run(3)
    one.expected(3)
    before, calls = everything(one), 0
    plain = torch.optim.AdamW.step

    def failing(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and not late:
            raise RuntimeError("an update")
        plain(self, *given, **named)
        if calls == 3:
            raise RuntimeError("an update")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", failing)
        with pytest.raises(RuntimeError, match="an update"):
            one.run(4)
    assert all(map(torch.equal, everything(one), before))
    one.run(5)
    one.expected(5)
    assert one.differs() == []
