"""Attributes that a forward sets to the same numbers at every call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError


class Clamps(nn.Module):
    """A window that is no larger than the input, as in Hugging Face's Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.window, self.shift = 16, 4

    def settle(self, x: Tensor) -> None:
        if x.shape[0] <= self.window:
            self.window, self.shift = x.shape[0], 0

    def forward(self, x: Tensor) -> Tensor:
        self.settle(x)
        result: Tensor = self.linear(x.roll(self.shift, 0)).view(self.window, -1)
        return result.square()


class Counts(Clamps):
    """Counts its calls."""

    def settle(self, x: Tensor) -> None:
        self.window, self.shift = x.shape[0], self.shift + 1


class First(Clamps):
    """Does something else in its first call."""

    def settle(self, x: Tensor) -> None:
        self.window = x.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.window)


class Keeps(Clamps):
    """Keeps a tensor."""

    def settle(self, x: Tensor) -> None:
        self.window, self.seen = x.shape[0], x.sum()


def test_they_are_set_as_the_first_call_sets_them() -> None:
    torch.manual_seed(0)
    model, x = Clamps(), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    planned = memopt.plan(model, (x,), progress=False).apply(model)
    assert (model.window, model.shift) == (6, 0)
    for one in (planned, twin):
        one(x).sum().backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(planned.parameters(), twin.parameters(), strict=True)
    )
    model.window = 3
    with pytest.raises(memopt.GuardError, match="window"):
        planned(x)


def test_a_tensor_beside_them_is_kept_by_each_step() -> None:
    model, x = Keeps(), torch.randn(6, 8)
    planned = memopt.plan(model, (x,), progress=False).apply(model)
    assert (model.window, model.shift) == (16, 4)
    assert not hasattr(model, "seen")
    planned(x).sum().backward()
    assert model.window == 6
    assert torch.equal(model.seen, x.sum())


def test_others_are_refused_and_left_as_they_were() -> None:
    model, x = Counts(), torch.randn(6, 8)
    with pytest.raises(CaptureError, match="changes Python state"):
        memopt.plan(model, (x,), progress=False)
    assert (model.window, model.shift) == (16, 4)
    assert not hasattr(model, "seen")


def test_the_plan_of_a_first_call_is_for_that_call() -> None:
    torch.manual_seed(0)
    model, x = First(), torch.randn(6, 8)
    expected = copy.deepcopy(model)(x)
    planned = memopt.plan(model, (x,), progress=False).apply(model)
    assert torch.equal(planned(x), expected)
    with pytest.raises(memopt.GuardError, match=r"window.*call the model once before planning"):
        planned(x)


class Rotates(Clamps):
    """Keeps a table for its last length, in tensors and a number."""

    table: Tensor | None = None

    def settle(self, x: Tensor) -> None:
        if self.window != x.shape[0]:
            self.window, self.shift = x.shape[0], 0
            self.table = torch.arange(x.shape[0]).cos()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        self.settle(x)
        assert self.table is not None
        return super().forward(x * self.table)


class Masks(Rotates):
    """Cuts its mask from the largest so far, as fairseq's decoders do."""

    def settle(self, x: Tensor) -> None:
        self.window, self.shift = x.shape[0], 0
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.ones(x.shape[0], 8).triu()
        self.table = self.table.to(x)

    def forward(self, x: Tensor) -> Tensor:
        self.settle(x)
        assert self.table is not None
        return Clamps.forward(self, x + self.table[: x.shape[0]])


class Compares(Rotates):
    """Asks its mask how long it is."""

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.ones(x.shape[0], x.shape[0])
        result: Tensor = self.linear(self.table @ x)
        return result


@pytest.mark.parametrize("kind", [Rotates, Masks, Compares])
def test_a_cache_is_built_anew_where_eager_does(kind: type[Rotates]) -> None:
    torch.manual_seed(0)
    twin = kind()
    twin.table = None
    model = memopt.wrap(copy.deepcopy(twin), None, "store-all", progress=False)
    short, long = torch.randn(4, 8), torch.randn(6, 8)
    for x, trains in ((short, True), (short, True), (long, False), (short, True), (long, True)):
        found = []
        for one in (model, twin):
            one.zero_grad()
            with torch.set_grad_enabled(trains):
                output = one(x)
            if trains:
                output.sum().backward()
            found.append([output, one.table])
            found[-1] += [p.grad for p in one.parameters() if trains]
        assert all(map(torch.equal, *found))
        assert model.window == twin.window
    assert (model.calls.planned, model.calls.original) == (4, 1)


class Says(nn.Module):
    """Says in an attribute, which it does not read, whether its last input was long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last = "none"

    def forward(self, x: Tensor) -> Tensor:
        self.last = "long" if x.shape[0] > 6 else "short"
        result: Tensor = self.linear(x)
        return result.square().mean()


def test_what_kinds_of_calls_set_otherwise_is_set_by_each_call() -> None:
    model = Says()
    memopt.wrap(model, None, "store-all", progress=False, cache=False)
    for length in (4, 5, 8, 9, 4, 8, 5, 9):
        model(torch.randn(length, 8)).backward()
        assert model.last == ("long" if length > 6 else "short"), length
    assert model.calls.planned == 8  # type: ignore[union-attr]
