"""Optimizer state on the host between updates: the same steps, less device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import ExecutionError, PlanFileError
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of
from memopt.step.profiled import ProfiledStep
from memopt.step.step_optimizer import HostState
from tests.whole_steps.test_train_step import MAKES, assert_same, batches, eager, planned, run

CPU = torch.device("cpu")


def offloaded(name: str, strategy: str = "olla", **arguments: Any) -> Any:
    return planned(MAKES[name], strategy, offload_optimizer=True, **arguments)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_steps_equal_eager(name: str) -> None:
    expected_model, expected_optimizer, expected_losses = eager(MAKES[name], True)
    model, optimizer, plan = offloaded(name)
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    assert_same(run(step, optimizer, True), expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())
    step.optimizer_to_device()
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())


def test_with_activations_offloaded_too() -> None:
    expected_model, _, expected_losses = eager(MAKES["adamw"])
    link = memopt.Device(to_host_bytes_per_s=1e9)
    for strategy in ("offload-graph", "dynprog"):
        model, optimizer, plan = offloaded("adamw", strategy, budget="min", device=link)
        assert plan.host_peak_bytes > 0
        step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
        assert_same(run(step, optimizer), expected_losses)
        assert_same(model.state_dict(), expected_model.state_dict())


def test_the_state_is_not_resident_and_the_peak_is_as_predicted() -> None:
    _, _, usual = planned(MAKES["adam"], whole_step=True)
    model, optimizer, plan = offloaded("adam")
    profiled = plan.profiled
    assert isinstance(profiled, ProfiledStep)
    # amsgrad keeps three tensors for each parameter that is trained.
    trained = sum(p.nbytes for p in model.parameters())
    assert profiled.host_state_bytes == 3 * trained
    assert plan.resident_bytes == usual.resident_bytes - profiled.host_state_bytes
    assert plan.peak_bytes < usual.peak_bytes
    assert plan.baseline.peak_bytes == usual.baseline.peak_bytes
    assert any("On the host between updates" in note for note in plan.notes)
    assert not any(note.startswith("Resident") for note in plan.notes)
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    (x, y), (x2, y2) = batches(2)
    step(x, targets=(y,))
    with metered(CPU) as use:
        step(x2, targets=(y2,))
    peak_bytes = plan.resident_bytes - backend_of("cpu").step_scalars_bytes + use.peak_bytes
    assert peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)
    assert use.end_bytes <= backend_of("cpu").step_scalars_bytes


def test_a_failing_update_leaves_its_state() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    host = HostState(optimizer)
    host.update(weight, torch.ones(4))
    assert host.bytes_total == 2 * weight.nbytes
    before = {key: value.clone() for key, value in optimizer.state[weight].items()}
    with pytest.raises(RuntimeError):
        host.update(weight, torch.ones(5))
    assert_same(dict(optimizer.state[weight]), before)
    fresh = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [fresh], "betas": (0.9, None)})
    with pytest.raises((TypeError, RuntimeError)):
        host.update(fresh, torch.ones(3))
    assert fresh not in optimizer.state


def test_state_from_before_and_loaded_state_move() -> None:
    model, optimizer, plan = offloaded("momentum")
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    (x, y), (x2, y2), _ = batches()
    step(x, targets=(y,))
    saved = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = {key: value.clone() for key, value in _tensors(saved).items()}
    torch.manual_seed(3)
    step(x2, targets=(y2,))
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    for key, value in state.items():
        _tensors(saved)[key].copy_(value)
    optimizer.load_state_dict(saved)
    again = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    torch.manual_seed(3)
    again(x2, targets=(y2,))
    assert_same(dict(model.state_dict()), after)


def test_a_loaded_plan(tmp_path: Path) -> None:
    expected_model, _, expected_losses = eager(MAKES["adam"])
    model, optimizer, plan = offloaded("adam")
    plan.save(tmp_path / "plan.json")
    step = memopt.load(tmp_path / "plan.json").train_step(
        model, nn.functional.cross_entropy, optimizer
    )
    assert_same(run(step, optimizer), expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert all(not v.untyped_storage().resizable() for v in held if v.dim() > 0)


def test_a_loaded_plan_without_state_takes_no_other_optimizer(tmp_path: Path) -> None:
    model, _, plan = planned(MAKES["sgd"])
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="of optimizer state"):
        memopt.load(tmp_path / "plan.json").train_step(
            model, nn.functional.cross_entropy, MAKES["adam"](model)
        )


def _tensors(saved: dict[str, Any]) -> dict[tuple[int, str], Tensor]:
    found = {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[index, key] = value
    return found


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is for whole steps"):
        planned(MAKES["adam"], "rotor", whole_step=False, offload_optimizer=True)
    with pytest.raises(ValueError, match="the optimizer's state alone takes"):
        offloaded("adam", host_budget=100)
    with pytest.raises(ValueError, match="the optimizer's state alone takes"):
        offloaded("adam", "store-all", host_budget=0)
    model, optimizer, plan = offloaded("adam", host_budget="1MiB")
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    x, y = batches(1)[0]

    def broken(*_: Any) -> None:
        raise RuntimeError("link")

    monkeypatch.setattr(HostState, "put_away", broken)
    with pytest.raises((ExecutionError, RuntimeError), match="link"):
        step(x, targets=(y,))


@pytest.mark.parametrize("offload", [False, True])
def test_what_libraries_keep_is_no_optimizer_state(
    offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA matrix products leave workspaces behind, which a plan charges."""
    monkeypatch.setattr("memopt.pricing.baseline.library_bytes", lambda device: 4096)
    more: dict[str, Any] = {"offload_optimizer": True} if offload else {"whole_step": True}
    model, optimizer, plan = planned(MAKES["adam"], "olla", **more)
    assert plan.record is not None
    assert plan.record.library_bytes == 4096
    plan.save(tmp_path / "plan.json")
    step = memopt.load(tmp_path / "plan.json").train_step(
        model, nn.functional.cross_entropy, optimizer
    )
    _, _, expected_losses = eager(MAKES["adam"])
    assert_same(run(step, optimizer), expected_losses)
