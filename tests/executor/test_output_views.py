"""Outputs that are views of one another: what a loss may do with them, and what they cost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import memopt
from memopt.errors import CaptureError, ExecutionError
from memopt.executor.module import PlannedModule

WIDTH = 64


class Views(nn.Module):
    """Two layers; a test's function of (model, hidden, y) is the output."""

    def __init__(self, function: Callable[..., Any], width: int = WIDTH) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        hidden = self.a(x).tanh()
        return self.function(self, hidden, self.b(hidden))


def planned(function: Callable[..., Any], **how: Any) -> tuple[Views, PlannedModule, Tensor]:
    torch.manual_seed(0)
    model, x = Views(function, 6), torch.randn(4, 6)
    how = {"strategy": "store-all", "cache": False, "progress": False, **how}
    return model, memopt.plan(model, x, **how).apply(model), x


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_the_same_tensor_twice_is_the_same_tensor() -> None:
    _, module, x = planned(lambda m, h, y: {"a": (y, None), "b": [h, y], "c": h})
    output = module(x)
    assert output["a"][0] is output["b"][1]
    assert output["b"][0] is output["c"]
    assert output["a"][1] is None


class Named(dict[str, Any]):
    """Has no names without a value, as Hugging Face's outputs."""


pytree.register_pytree_node(
    Named,
    lambda named: (list(named.values()), list(named)),
    lambda values, names: Named(
        (name, value) for name, value in zip(names, values, strict=True) if value is not None
    ),
)


def test_the_same_tensor_twice_where_a_name_goes_with_its_value() -> None:
    def named(m: Views, h: Tensor, y: Tensor) -> Any:
        return {"first": h, "named": Named(again=h, other=y)}

    model, module, x = planned(named)
    output = module(x)
    assert list(output["named"]) == ["again", "other"]
    assert output["named"]["again"] is output["first"]
    assert torch.equal(output["named"]["other"], model(x)["named"]["other"])


def test_dimensions_of_one_keep_their_strides() -> None:
    for function in (
        lambda m, h, y: (y[:, :1], y[:, :1].t(), y.unsqueeze(1).transpose(0, 2)),
        lambda m, h, y: (h.argmax(-1, keepdim=True).t(), y.max(-1, keepdim=True)[0].t(), y.t()),
    ):
        model, module, x = planned(function)
        for got, expected in zip(module(x), model(x), strict=True):
            assert got.stride() == expected.stride()


def test_slices_may_be_changed_in_place() -> None:
    model, module, x = planned(lambda m, h, y: (y[:, :2], y[:, 2:]))
    results = []
    for one in (model, module):
        mean, spread = one(x)
        spread.clamp_(-0.5, 0.5)
        (mean.square() * spread.sum()).sum().backward()
        results.append(gradients(model))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "function",
    [lambda m, h, y: (y, y.t()), lambda m, h, y: (h, m.a.weight.t())],
    ids=["of an output", "of a parameter"],
)
def test_what_others_share_may_not(function: Callable[..., Any]) -> None:
    _, module, x = planned(function)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        module(x)[1].mul_(2)


@pytest.mark.parametrize(
    "function",
    [lambda m, h, y: y.tanh(), lambda m, h, y: (y, y.tanh()[:, 2:])],
    ids=["itself", "view"],
)
def test_what_the_backward_reads_may_not_be_changed(function: Callable[..., Any]) -> None:
    model, module, x = planned(function)
    for one, error in ((model, RuntimeError), (module, ExecutionError)):
        last = pytree.tree_leaves(one(x))[-1]
        last.mul_(2)
        with pytest.raises(error, match=r"in ?place"):
            last.sum().backward()


def test_a_step_without_a_backward_leaves_nothing_behind() -> None:
    _, module, x = planned(lambda m, h, y: (h, h[:, 2:], y.tanh()))
    runtime = module.__dict__["_memopt"].runtime
    for _ in range(3):
        module(x)
    gc.collect()
    assert len(runtime) == 0


def test_backwards_are_traced_for_the_layouts_of_the_loss(tmp_path: Path) -> None:
    """A contiguous gradient for a transposed output, summed in eager's order."""
    torch.manual_seed(0)
    weights = torch.linspace(0.1, 2.0, 512 * WIDTH).view(WIDTH, 512)

    def loss(y: Tensor) -> Tensor:
        return (y * weights).sum()

    model, x = Views(lambda m, h, y: y.t()), torch.randn(512, WIDTH)
    plan = memopt.plan(model, x, strategy="store-all", loss_fn=loss, cache=False, progress=False)
    assert plan.output_gradients.strides == ((0, (512, 1)),)
    plan.save(tmp_path / "plan")
    again = memopt.load(tmp_path / "plan")
    results = []
    for one in (model, plan.apply(model), again.apply(model)):
        loss(one(x)).backward()
        results.append(gradients(model))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_outputs_that_are_not_there_are_refused() -> None:
    from memopt.capture.capture import capture
    from memopt.models.record import OutputGradients
    from memopt.step.inputs import to_call

    for known in (OutputGradients(unused=(1,)), OutputGradients(strides=((1, (6, 1)),))):
        with pytest.raises(CaptureError, match="returned 1 values"):
            capture(
                Views(lambda m, h, y: y, 6), to_call(torch.randn(4, 6)), lambda known=known: known
            )


def squares(output: Any) -> Tensor:
    """Reads every output twice."""
    total = torch.zeros(())
    for value in pytree.tree_leaves(output):
        if value.requires_grad:
            total = (
                total + value.square().mean() + functional.mse_loss(value, torch.ones_like(value))
            )
    return total


def joined(output: Any) -> Tensor:
    """Its gradients are parts of one tensor."""
    return torch.cat([v.flatten() for v in pytree.tree_leaves(output)]).square().sum()


KINDS: dict[str, Callable[..., Any]] = {
    "halves": lambda m, h, y: (y[:, : WIDTH // 2], y[:, WIDTH // 2 :], y.t()),
    "twice": lambda m, h, y: (y, y, y.view(-1)),
    "gaps": lambda m, h, y: (y[:, ::2], h.view(-1, 4, 4, 4).permute(0, 2, 3, 1)),
    "overlapping": lambda m, h, y: y.unfold(-1, 4, 2),
    "parameters": lambda m, h, y: (y, m.a.weight, m.b.weight.t()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [None, squares, joined], ids=["any", "squares", "joined"])
def test_predicted_is_measured(kind: str, loss: Callable[..., Tensor] | None) -> None:
    torch.manual_seed(0)
    model, x = Views(KINDS[kind]), torch.randn(256, WIDTH)
    for strategy, budget in (("rotor", "min"), ("store-all", None)):
        plan = memopt.plan(model, x, budget=budget, strategy=strategy, loss_fn=loss, progress=False)
        measured = plan.check(model, loss_fn=loss).measured_peak_bytes
        assert 0.995 * plan.peak_bytes <= measured <= plan.peak_bytes, strategy


class Normalised(nn.Module):
    """An output whose strides torch's fake kernels get wrong, and which is used inside, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.a(x).transpose(1, 2)).transpose(1, 2)
        return self.b(y).log_softmax(-1), y


def test_gradients_come_in_the_losss_layout_whatever_the_fake_output_has() -> None:
    torch.manual_seed(1)
    model, x = Normalised(), torch.randn(4, 3, 8)
    weights = torch.linspace(0.5, 1.5, 96).reshape(4, 3, 8)

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return (output[0] * weights).sum() + (output[1] * weights).sum()

    loss(model(x)).backward()
    expected = gradients(model)
    plan = memopt.plan(model, x, strategy="store-all", loss_fn=loss, cache=False, progress=False)
    loss(plan.apply(model)(x)).backward()
    assert all(map(torch.equal, gradients(model), expected))
