"""Updates that are ready together run as one optimizer step: eager's bits, and the planned peak."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import memopt
from memopt.errors import ExecutionError
from memopt.executor.train_step import TrainStep
from memopt.pricing.memory import metered
from memopt.step.optimizer_state import PER_PARAMETER
from memopt.step.step_optimizer import Touch
from memopt.torch_private.modes import TorchDispatchMode
from tests.executor.tiny_gpt import TinyGPT, batch, loss_of
from tests.whole_steps.test_train_step import assert_same


def _default(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


OPTIMIZERS = {
    "default": _default,
    "loops": lambda parameters: AdamW(parameters, lr=0.01, foreach=False),
    "foreach": lambda parameters: AdamW(parameters, lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    "groups": lambda parameters: SGD(
        [{"params": [p], "lr": 0.1 / (1 + i)} for i, p in enumerate(parameters)], momentum=0.9
    ),
}


@dataclass
class Made:
    model: nn.Module
    optimizer: Optimizer
    plan: memopt.Plan
    step: TrainStep
    ids: Tensor
    targets: Tensor

    def __call__(self) -> Tensor:
        return self.step(self.ids, targets=(self.targets,))


def _made(optimizer_of: Any = _default, **options: Any) -> Made:
    torch.manual_seed(0)
    model, (ids, targets) = TinyGPT(1), batch()
    optimizer = optimizer_of(model.parameters())
    plan = memopt.plan(
        model, ids, loss_fn=loss_of, targets=(targets,), optimizer=optimizer, progress=False,
        strategy="store-all",
    )  # fmt: skip
    step = plan.train_step(model, loss_of, optimizer, **options)
    return Made(model, optimizer, plan, step, ids, targets)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_equal_eagers(kind: str) -> None:
    made = _made(OPTIMIZERS[kind])
    twin = copy.deepcopy(made.model)
    expected = OPTIMIZERS[kind](twin.parameters())
    together = re.findall(r"update\.together\((.*)\)", made.step.code)
    alone = re.findall(r"update\(", made.step.code)
    assert len(together) + len(alone) < 17 / 2
    assert sum(one.count("'") for one in together) // 2 + len(alone) == 17
    for number in range(3):
        torch.manual_seed(number)
        with metered(torch.device("cpu")) as use:
            made()
        torch.manual_seed(number)
        loss_of(twin(made.ids), made.targets).backward()  # type: ignore[no-untyped-call]
        expected.step()
        expected.zero_grad()
    assert_same(made.model.state_dict(), twin.state_dict())
    assert_same(made.optimizer.state_dict()["state"], expected.state_dict()["state"])
    assert use.peak_bytes <= made.plan.peak_bytes - made.plan.resident_bytes


@pytest.mark.parametrize("undo", [False, True])
def test_a_failure_names_all_that_may_be_changed_in_part(
    undo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _made(undo=undo)
    made()
    before = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))

    real = torch._foreach_lerp_

    def failing(tensors: Any, *arguments: Any) -> None:
        if len(tensors) > 2:
            raise RuntimeError("no memory")
        real(tensors, *arguments)

    # After the parameters have decayed.
    monkeypatch.setattr(torch, "_foreach_lerp_", failing)
    with pytest.raises(RuntimeError if undo else ExecutionError) as caught:
        made()
    now = made.model.state_dict()
    changed = {name for name, value in before[0].items() if not torch.equal(value, now[name])}
    if undo:
        assert_same((now, made.optimizer.state_dict()), before)
        return
    said = re.search(r"after (\d+) of 17 .* updated, and (.*) or their state", str(caught.value))
    assert said
    in_part = said[2].split(", ")
    assert len(in_part) > 2
    assert len(changed) == int(said[1]) + len(in_part)
    assert changed.issuperset(in_part)


class _FirstChanged(TorchDispatchMode):
    """Notes which of some tensors the first operator that changes any of them has changed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors, self.before = tensors, [one.detach().clone() for one in tensors]
        self.changed: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.changed:
            pairs = zip(self.tensors, self.before, strict=True)
            self.changed = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        return result


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", sorted(PER_PARAMETER, key=lambda kind: kind.__name__))
def test_optimizers_count_a_step_before_anything_else(kind: type[Optimizer], foreach: bool) -> None:
    """What a failed update has changed is told by the count of steps alone, where there is one."""
    parameter = nn.Parameter(torch.randn(3))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "maximize": True}
    if kind in (SGD, torch.optim.RMSprop):
        options["momentum"] = 0.9
    optimizer = kind([parameter], foreach=foreach, **options)  # type: ignore[call-arg]
    for _ in range(2):
        parameter.grad = torch.randn(3)
        optimizer.step()
    state = optimizer.state[parameter]
    counts = isinstance(state.get("step"), Tensor)
    assert counts != (kind is SGD)
    tensors = [state["step"]] if counts else []
    tensors += [one for name, one in state.items() if name != "step" and one is not None]
    with _FirstChanged([*tensors, parameter]) as first:
        optimizer.step()
    assert first.changed
    assert not counts or first.changed == [0]
    touch = Touch(optimizer, parameter)
    assert not touch.changed()
    optimizer.step()
    assert touch.changed()
