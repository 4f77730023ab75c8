"""Whole steps some of whose updates the host runs, beside the device."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.executor import host_updates
from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.moved import updates_on_host
from memopt.programs.replay import replay
from tests.whole_steps.test_failing_steps import Fault
from tests.whole_steps.test_moved_parameters import LOSS, Made, batch, everything, layers, lora
from tests.whole_steps.test_train_step import assert_same

HOST = memopt.Device(to_host_bytes_per_s=5e8, host_update_bytes_per_s=5e9)


def made_with(model: nn.Module, share: float, **options: Any) -> Made:
    made = Made(model, share, device=HOST, **options)
    assert hosted(made) > 1
    return made


def hosted(made: Made) -> int:
    return len(updates_on_host(made.plan.graph, made.plan.program))


@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_equal_eager_within_both_budgets(interpreted: bool) -> None:
    made = made_with(layers(64, 2), 0.6, interpreted=interpreted)
    made.run(0, 3)
    made.assert_same()
    assert made.metered_peak() == pytest.approx(made.plan.peak_bytes, rel=0.005)
    if not interpreted:
        assert "homes.update(" in made.step.code
        assert f"{hosted(made)} updates, " in str(made.plan)
        # All copies that there are at once, and the scratch memory of an update.
        account = made.step._homes.swap.account
        graph = made.plan.graph
        runs = updates_on_host(graph, made.plan.program)
        scratch = max(
            variant(graph.operators[x.op], x.implementation).workspace_bytes for x in runs
        )
        assert account.peak_bytes + scratch == made.plan.host_peak_bytes


@pytest.mark.slow
def test_four_times_the_budget_for_twenty_steps() -> None:
    made = made_with(layers(192, 9), 0.25)
    made.run(0, 20)
    made.assert_same()
    assert made.metered_peak() <= made.plan.budget


@pytest.mark.slow
def test_a_frozen_base() -> None:
    made = made_with(lora(), 0.35)
    made.run(0, 3)
    made.assert_same()


def test_the_device_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """No update on the host begins before the device has done all its work."""
    made = made_with(layers(64, 2), 0.6)
    arrived, threads = threading.Event(), set()
    wait, update = host_updates.HostUpdates.wait, host_updates.update_one

    def waiting(self: Any, tensor: int) -> None:
        arrived.set()
        wait(self, tensor)

    def late(*arguments: Any) -> None:
        threads.add(threading.current_thread().name)
        assert arrived.wait(60)
        update(*arguments)

    monkeypatch.setattr(host_updates.HostUpdates, "wait", waiting)
    monkeypatch.setattr(host_updates, "update_one", late)
    made.run(0, 1)
    assert threads == {"memopt-host"}
    monkeypatch.undo()
    made.run(1, 1)
    made.assert_same()


@pytest.mark.parametrize("undo", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_update_that_fails_on_the_host(undo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_with(layers(64, 2), 0.6, undo=undo)
    made.run(0, 1)
    before = everything(made)
    x, y = batch(1)
    plain, calls = host_updates.update_one, [0]

    def failing(optimizer: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            parameter.add_(1)
            raise Fault("on the host")
        plain(optimizer, parameter, gradient)

    monkeypatch.setattr(host_updates, "update_one", failing)
    with pytest.raises((Fault, memopt.MemoptError), match="on the host") as caught:
        made.step(x, targets=(y,))
    monkeypatch.undo()
    assert calls == [2]
    names = [name for name, _ in made.model.named_parameters()]
    changed = [n for n in names if not torch.equal(everything(made)[0][n], before[0][n])]
    if undo:
        assert changed == []
        assert_same(everything(made)[1]["state"], before[1]["state"])
    else:
        done = int(str(caught.value).split("after ")[1].split()[0])
        assert "perhaps in part" in str(caught.value)
        assert len(changed) == done + 1
    made.model.load_state_dict(before[0])
    made.optimizer.load_state_dict(before[1])
    made.run(1, 2)
    made.assert_same()


@pytest.mark.filterwarnings("error:Detected call of")
def test_plans_from_files_schedules_and_groups(tmp_path: Path) -> None:
    made = made_with(layers(64, 2), 0.6)
    made.plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    assert loaded.host_peak_bytes == made.plan.host_peak_bytes
    made.step = loaded.train_step(made.model, LOSS, made.optimizer)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (made.optimizer, made.eager)]
    for number in range(3):
        made.run(number, 1)
        for schedule in schedules:
            schedule.step()
    made.assert_same()
    saved = copy.deepcopy(made.optimizer.state_dict())
    made.optimizer.load_state_dict(saved)
    made.run(3, 1)
    made.assert_same()


@pytest.mark.slow
def test_a_host_budget_is_kept() -> None:
    free = made_with(layers(64, 2), 0.6).plan
    budget = free.host_peak_bytes - 1
    made = Made(layers(64, 2), 0.6, device=HOST, host_budget=budget)
    assert made.plan.host_peak_bytes <= budget
    made.run(0, 2)
    made.assert_same()


@pytest.mark.slow
def test_a_device_without_a_rate_of_its_host_updates_itself() -> None:
    made = Made(layers(64, 2), 0.8)
    assert not hosted(made)
    graph: Graph = made.plan.graph
    assert not any(operator.implementations for operator in graph.operators)
    assert replay(graph, made.plan.program, made.plan.device).host_updates == ()
