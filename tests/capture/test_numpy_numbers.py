"""Numbers that a forward computes in NumPy are numbers, as in eager, and no tensors of float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError


class Computing(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.compute, self.factors = nn.Linear(4, 6), compute, np.array([1.1, 2.2])
        self.factor, self.scale = float(self.factors[0]), np.sqrt(6.0)
        self.size = np.prod((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.linear(x))


COMPUTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "logarithm": lambda _, y: -0.5 * 2 * np.log(2 * np.pi) - y.sum(),
    "root of a size": lambda _, y: y.sum() / np.sqrt(y.shape[-1]) * np.mean([1.0, 2.5]),
    "integers": lambda _, y: ((y > 0).long() * np.sqrt(2.0)).sum() * y.sum(),
    "class": lambda _, y: y.sum() * (2.0 if isinstance(np.sqrt(2.0), float) else 3.0),
    "size": lambda _, y: y.view(int(np.prod(y.shape))).sum(),
    "methods": lambda _, y: y.sum() * np.sqrt(2.0).item() * np.sqrt(3.0).astype(np.float32),
    "new tensor": lambda _, y: y.sum() * torch.tensor(2 * np.sqrt(2.0)),
    "new tensor of several": lambda _, y: y.sum() * torch.tensor([1.0, np.sqrt(2.0)])[1],
    "narrow array": lambda _, y: y.sum() * torch.from_numpy(np.ones(2, np.float32) * np.sqrt(2.0)),
    "Python's": lambda _, y: y.sum() * torch.tensor(0.5) * math.sqrt(2.0),
    "made before": lambda model, y: y.sum() * model.factor,
    "attribute": lambda model, y: (y / model.scale).bfloat16().sum() * model.scale.item(),
    "size in an attribute": lambda model, y: y.view(-1, model.size)[:, : model.size - 1].sum(),
    "class of an attribute": lambda model, y: y.sum() * (2 if type(model.scale) is float else 3),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_number_of_numpy_leaves_eagers_dtype_and_bits(name: str) -> None:
    torch.manual_seed(0)
    planned, x = Computing(COMPUTED[name]), torch.randn(3, 4)
    eager = copy.deepcopy(planned)
    memopt.wrap(planned, "min", "store-all", progress=False)
    results = [model(x) for model in (eager, planned)]
    for result in results:
        result.sum().backward()
    assert results[0].dtype == results[1].dtype
    assert torch.equal(*results)
    assert torch.equal(*(model.linear.weight.grad for model in (eager, planned)))


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an array's": lambda model, y: y.sum() * model.factors[0],
    "narrow": lambda _, y: y.sum().bfloat16() * np.float32(1.1),
    "data of a new tensor": lambda model, y: y.sum() * torch.tensor(model.scale),
    "beside a new tensor": lambda _, y: y.sum() * np.sqrt(2.0) * torch.tensor(0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_takes_for_a_tensor_is_refused(name: str) -> None:
    planned = memopt.wrap(Computing(REFUSED[name]), "min", "store-all", progress=False)
    with pytest.raises(CaptureError, match=r"a number (of|out of a) numpy.*Python.*__init__"):
        planned(torch.randn(3, 4))


def test_an_attribute_that_changes_has_a_plan_of_its_own() -> None:
    planned, x = Computing(COMPUTED["attribute"]), torch.randn(3, 4)
    eager = copy.deepcopy(planned)
    memopt.wrap(planned, "min", "store-all", progress=False)
    for scale in (np.sqrt(2.0), np.sqrt(3.0), np.sqrt(2.0)):
        eager.scale = planned.scale = scale
        assert torch.equal(eager(x), planned(x))
    assert planned.calls.planned == 3  # type: ignore[union-attr]
