"""A planned module runs the planned call, or says what differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.errors import GuardError
from memopt.executor.guard import Guard
from memopt.executor.module import PlannedModule
from memopt.step.inputs import to_call
from tests.executor.harness import Prepared, prepare


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.drop(self.norm(self.a(x))) * scale


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(Model(), torch.randn(4, 6))


@pytest.fixture
def planned(prepared: Prepared) -> PlannedModule:
    """The plan around a copy of the model, to be damaged."""
    return copy.deepcopy(prepared.planned())


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: (torch.randn(5, 6),), r"argument 0: planned float32\[4, 6\].*got float32\[5, 6\]"),
    (lambda: (torch.randn(4, 6).double(),), r"planned float32.*got float64"),
    (lambda: (torch.randn(6, 4).t(),), r"stride \(6, 1\) on cpu, got .* stride \(1, 4\)"),
    (lambda: (torch.randn(4, 6, requires_grad=True),), "on cpu, got .* on cpu, requires_grad"),
    (lambda: (torch.randn(4, 6, device="meta"),), "on cpu, got .* on meta"),
    (lambda: ("text",), r"argument 0: planned float32\[4, 6\].*got 'text'"),
    (lambda: (torch.randn(4, 6), 2.0), r"planned model\(float32\[4, 6\]\), got model\(.*, 2\.0\)"),
    (lambda: (), r"got model\(\)"),
]


@pytest.mark.parametrize(("arguments", "message"), CALLS)
def test_other_call(planned: PlannedModule, arguments: Callable[[], Any], message: str) -> None:
    with pytest.raises(GuardError, match=message + ".*plan again"):
        planned(*arguments())


def freeze(model: nn.Module) -> None:
    model.a.requires_grad_(False)


def half(model: nn.Module) -> None:
    model.half()


def evaluate_norm(model: nn.Module) -> None:
    model.norm.eval()


def other_dropout(model: nn.Module) -> None:
    model.drop.p = 0.1


def other_momentum(model: nn.Module) -> None:
    model.norm.momentum = 0.5


def replace_module(model: nn.Module) -> None:
    model.drop = nn.Identity()


def remove_module(model: nn.Module) -> None:
    del model.drop


def grow(model: nn.Module) -> None:
    model.a = nn.Linear(6, 7)


def remove_bias(model: nn.Module) -> None:
    model.a.bias = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (freeze, r"a\.weight: planned .*requires_grad, got"),
        (half, r"a\.weight: planned float32.*got float16"),
        (evaluate_norm, "module 'norm': planned in train mode, got eval mode"),
        (other_dropout, "module 'drop': planned p=0.5, got 0.1"),
        (other_momentum, "module 'norm': planned momentum=0.1, got 0.5"),
        (replace_module, "module 'drop': planned Dropout, got Identity"),
        (remove_module, "module 'drop': planned Dropout, got nothing"),
        (grow, r"module 'a': planned out_features=6, got 7"),
        (remove_bias, r"parameter or buffer 'a\.bias' is gone"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_other_model(
    planned: PlannedModule, change: Callable[[nn.Module], None], message: str
) -> None:
    change(planned.original)
    with pytest.raises(GuardError, match=message):
        planned(torch.randn(4, 6))


def test_other_autocast(planned: PlannedModule) -> None:
    with (
        pytest.raises(GuardError, match=r"autocast: planned .*None.*got .*bfloat16"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        planned(torch.randn(4, 6))


def test_new_values_in_place_are_fine(planned: PlannedModule) -> None:
    planned.load_state_dict({k: v + 1 for k, v in planned.state_dict().items()})
    torch.manual_seed(0)
    found = planned(torch.ones(4, 6))
    torch.manual_seed(0)
    assert torch.equal(found, planned.original(torch.ones(4, 6)))


def test_new_parameter_objects_are_fine(planned: PlannedModule) -> None:
    planned.original.a.weight = nn.Parameter(torch.zeros(6, 6))
    planned(torch.ones(4, 6)).sum().backward()
    assert planned.original.a.weight.grad is not None


def test_planned_in_eval_then_trained() -> None:
    planned = prepare(Model().eval(), torch.randn(4, 6)).planned()
    planned.train()
    with pytest.raises(GuardError, match="the model: planned in eval mode, got train mode"):
        planned(torch.randn(4, 6))
    planned.eval()
    assert planned(torch.randn(4, 6)).grad_fn.name() == "CompiledFunctionBackward"


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) * y


def test_arguments_that_were_one_tensor() -> None:
    x = torch.randn(4, 6)
    planned = prepare(Product(), (x, x)).planned()
    planned(x, x)
    with pytest.raises(GuardError, match="argument 1: planned as the same tensor as argument 0"):
        planned(x, x.clone())


def test_argument_that_was_a_parameter() -> None:
    model, x = Product(), torch.randn(6, 6)
    planned = prepare(model, (x, model.a.weight)).planned()
    planned(x, model.a.weight)
    other = torch.randn(6, 6, requires_grad=True)
    with pytest.raises(GuardError, match=r"argument 1: planned as the model's a\.weight"):
        planned(x, other)


def test_arguments_that_became_one_tensor() -> None:
    x = torch.randn(4, 6)
    planned = prepare(Product(), (x, x.clone())).planned()
    assert torch.equal(planned(x, x), planned.original(x, x))

    class Updating(Product):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return self.a(y * 2)

    updating = prepare(Updating(), (x, x.clone())).planned()
    with pytest.raises(GuardError, match="planned as a tensor of its own, got the same tensor"):
        updating(x, x)


def test_nan_is_compared_by_its_text() -> None:
    model = Model()
    guard = Guard.of(model, to_call((torch.randn(4, 6), float("nan"))))
    guard.check(model, to_call((torch.randn(4, 6), float("nan"))))
    with pytest.raises(GuardError, match=r"argument 1: planned 'nan', got 1\.0"):
        guard.check(model, to_call((torch.randn(4, 6), 1.0)))


def test_dictionaries_with_another_order() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.a(batch["x"]) - batch["y"]

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    planned = prepare(Takes(), ({"x": x, "y": y},)).planned()
    expected = planned.original({"x": x, "y": y})
    try:
        found = planned({"y": y, "x": x})
    except GuardError:
        return
    assert torch.equal(found, expected)
