"""A whole step whose forward goes another way than planned runs as the loop without memopt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError, ExecutionError, GuardError


class Turning(nn.Module):
    """Branches on activations and on its inputs."""

    def __init__(self, of_inputs: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.of_inputs = nn.Dropout(0.2), of_inputs

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.drop(self.norm(self.linear(x)))
        if self.of_inputs:
            return h * 2 if x.sum() > 0 else h
        if h.isnan().any():
            raise ValueError("not a number")
        return h * 2 if h[0].sum() > 0 else h + 1


def mean_square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def inputs(number: int) -> Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
    return x.abs() if number % 3 else -x.abs()


def made(of_inputs: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Turning(of_inputs)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def plan_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> memopt.Plan:
    wanted: dict[str, Any] = {"budget": "min", "strategy": "rotor", **options}
    return memopt.plan(
        model,
        inputs(1),
        loss_fn=mean_square,
        optimizer=optimizer,
        whole_step=True,
        progress=False,
        **wanted,
    )


def state(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> list[Tensor]:
    held = [one for p in model.parameters() for one in optimizer.state[p].values()]
    every = [loss, *model.parameters(), *model.buffers(), *held, torch.get_rng_state()]
    return [one.detach().clone() for one in every]


@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_step_that_goes_otherwise_runs_as_the_original(
    of_inputs: bool, clip_norm: float | None
) -> None:
    model, optimizer = made(of_inputs)
    torch.manual_seed(1)
    expected = []
    for number in range(8):
        loss = mean_square(model(inputs(number)))
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(state(model, optimizer, loss))
    model, optimizer = made(of_inputs)
    step = plan_of(model, optimizer, clip_norm=clip_norm).train_step(model, mean_square, optimizer)
    torch.manual_seed(1)
    found = []
    with pytest.warns(UserWarning, match="a training step ran without its plan") as heard:
        found += [state(model, optimizer, step(inputs(number))) for number in range(8)]
    for these, those in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(these, those, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [str(one.message) for one in heard].count(str(heard[0].message)) == 1
    assert 0 < step.unplanned < len(expected)


def test_a_check_still_fails_before_anything_changes() -> None:
    model, optimizer = made(of_inputs=False)
    step = plan_of(model, optimizer).train_step(model, mean_square, optimizer)
    before = [one.clone() for one in model.state_dict().values()]
    with pytest.raises(ExecutionError, match="a check in the forward fails"):
        step(torch.full((6, 8), float("nan")))
    after = model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_steps_that_cannot_run_without_a_plan_are_refused() -> None:
    model, optimizer = made(of_inputs=False)
    with pytest.raises(CaptureError, match="cannot run again without its plan"):
        plan_of(model, optimizer, micro_batches=2, strategy="store-all", budget=None)
    model, optimizer = made(of_inputs=False)
    plan = plan_of(model, optimizer, offload_optimizer=True)
    with pytest.raises(ValueError, match=r"cannot run without its plan.*or the module alone"):
        plan.train_step(model, mean_square, optimizer)
    model, optimizer = made(of_inputs=True)
    plan = plan_of(model, optimizer, offload_optimizer=True)
    step = plan.train_step(model, mean_square, optimizer)
    step(inputs(1))
    with pytest.raises(GuardError, match="the forward reads its inputs' values"):
        step(inputs(0))
