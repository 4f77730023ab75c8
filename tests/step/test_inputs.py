"""Example inputs as calls, and later calls in their form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt.step.described import described
from memopt.step.inputs import Call, align, to_call

X, Y = torch.zeros(2), torch.ones(2)


class Model(nn.Module):
    def forward(
        self, x: Tensor, y: Tensor | None = None, *rest: Tensor, scale: float = 1.0, **more: Any
    ) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X], (X,), {}),
        ({"x": X, "scale": 2.0}, (), {"x": X, "scale": 2.0}),
    ],
)
def test_to_call(inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = to_call(inputs)
    assert [id(v) for v in call.args] == [id(v) for v in args]
    assert call.kwargs.keys() == kwargs.keys()
    assert to_call(call) is call


def test_leaves_keep_none() -> None:
    call = Call((X, None), {"d": {"b": Y, "a": [1, "t"]}})
    assert len(call.leaves) == 5
    assert call.leaves[1] is None
    assert [id(t) for t in call.tensors()] == [id(X), id(Y)]


@pytest.mark.parametrize(
    ("planned", "given"),
    [
        (Call((X,), {}), Call((), {"x": Y})),
        (Call((), {"x": X}), Call((Y,), {})),
        (Call((X,), {}), Call((Y, None), {})),
        (Call((X,), {}), Call((Y,), {"scale": 1.0})),
        (Call((X, None), {}), Call((Y,), {})),
        (Call((), {"scale": 1.0, "x": X}), Call((Y,), {})),
        (Call((), {"extra": 3, "x": X}), Call((Y,), {"extra": 3})),
        (Call((), {"x": X, "scale": 2.0}), Call((), {"scale": 2.0, "x": Y})),
    ],
)
def test_align(planned: Call, given: Call) -> None:
    found = align(Model(), planned, given.args, given.kwargs)
    assert found.spec == planned.spec
    assert list(found.kwargs) == list(planned.kwargs)
    assert [v for v in found.leaves if not isinstance(v, Tensor)] == [
        v for v in planned.leaves if not isinstance(v, Tensor)
    ]
    assert [id(t) for t in found.tensors()] == [id(Y)]


@pytest.mark.parametrize(
    ("planned", "given"),
    [
        (Call((X,), {}), Call((X,), {"scale": 2.0})),
        (Call((X,), {}), Call((X, Y), {})),
        (Call((X,), {}), Call((X, None, Y), {})),
        (Call((X,), {}), Call((X,), {"unknown": 1})),
        (Call((X, Y), {}), Call((), {})),
        (Call((), {"extra": 3, "x": X}), Call((X,), {})),
    ],
)
def test_calls_that_differ_stay_as_they_are(planned: Call, given: Call) -> None:
    found = align(Model(), planned, given.args, given.kwargs)
    assert found.spec != planned.spec
    assert [id(v) for v in found.args] == [id(v) for v in given.args]


def test_a_tensor_is_never_a_default() -> None:
    found = align(Model(), Call((X,), {}), (X,), {"scale": torch.tensor(1.0)})
    assert "scale" in found.kwargs


def test_tensors_that_are_let_go_keep_their_layouts() -> None:
    whole, own, buffer = torch.arange(12.0).view(3, 4), nn.Parameter(torch.ones(2)), torch.ones(2)
    rest: list[Any] = [buffer, whole, 3]
    call = Call((whole.t(), whole[1:]), {"a": own, "b": rest, "c": whole})
    before, memory = list(map(described, call.leaves)), StorageWeakRef(whole.untyped_storage())  # type: ignore[no-untyped-call]
    call.let_go([buffer])
    rest.clear()
    del whole
    assert memory.expired()  # type: ignore[no-untyped-call]
    assert list(map(described, call.leaves)) == before
    assert call.kwargs["a"] is own
    assert call.kwargs["b"][0] is buffer
    call.let_go([])
    full = call.filled()
    assert full.kwargs["b"][1] is full.kwargs["c"]
    full.kwargs["c"][2, 3] = 7
    assert (full.args[0][3, 2], full.args[1].sum()) == (7, 7)
    assert full.filled() is full


def test_tensors_on_meta_are_filled_on_the_cpu() -> None:
    wide = torch.empty_strided((3, 4), (1, 3), dtype=torch.int64, device="meta")
    found, same = Call((wide, X), {}).filled().args
    assert found.equal(torch.zeros(3, 4, dtype=torch.int64))
    assert found.stride() == (1, 3)
    assert same is X


class _Asynchronous(torch.autograd.Function):
    """Hands out a value as DTensor's `to_local` does the result of a collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = AsyncCollectiveTensor(x.detach() * 2)
        result.completed = True
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0]


def test_the_result_of_a_collective_gets_its_gradient() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)
    found = []
    for _ in range(2):
        x.grad = None
        model(_Asynchronous.apply(x)).square().sum().backward()  # type: ignore[no-untyped-call]
        found.append(x.grad)
        memopt.wrap(model, "min", "store-all", progress=False) if len(found) == 1 else None
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])
    assert memopt.running(model).calls.planned == 1
