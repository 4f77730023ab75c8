"""A forward that looks at its values may change them afterwards, return them, or keep an operator
from failing: planned, it does and raises what eager does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.executor.module import captured_of
from memopt.executor.self_planning import planning_of


class Looking(nn.Module):
    """Trains a layer, and looks at values."""

    ready: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.words = nn.Embedding(10, 16)
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.look(self.linear(x).relu(), *more)

    def look(self, h: Tensor, *more: Tensor) -> Any:
        raise NotImplementedError


class ChangesBuffer(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        if not self.ready:
            raise ValueError("not ready")
        self.ready.fill_(True)
        return self.last(h)


class ChangesValue(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        ready = self.ready.clone()
        if not ready:
            raise ValueError("not ready")
        ready.fill_(True)
        return self.last(h) * ready


class ChangesAfterNumber(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        ready = self.ready.item()
        self.ready.fill_(True)
        if not ready:
            raise ValueError("not ready")
        return self.last(h)


class ReturnsValue(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        finite = torch.isfinite(h).all()
        if not finite:
            h = torch.nan_to_num(h)
        return self.last(h), finite


class ChecksNumbers(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        if (more[0] >= 10).any():
            raise ValueError("no such word")
        return self.last(h + self.words(more[0]))


class CountsSteps(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        torch._assert_async((h >= 0).logical_or(h.isnan()).all(), "negative")
        self.steps += 1
        if torch.isnan(h).any().cpu().item():
            h = torch.nan_to_num(h)
        return self.last(h) * self.steps


class ComparesTwice(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        level = h.mean().item()
        return self.last(h) if 0 <= level < 9 and level < 8 else -self.last(h)


class LooksAtDrawn(Looking):
    def forward(self, x: Tensor, *more: Tensor) -> Any:
        kept = F.dropout(x, 0.2)
        return self.last(kept) if kept.abs().sum() < 1e9 else -self.last(kept)


class CountsWords(Looking):
    def look(self, h: Tensor, *more: Tensor) -> Any:
        self.steps += 1
        if len(set(more[0].tolist())) != 1:
            raise ValueError("several words")
        if (more[0] >= 10).any():
            raise ValueError("no such word")
        return self.last(h + self.words(more[0]))


def trained(model: Looking, calls: list[tuple[Tensor, ...]]) -> list[Any]:
    """What each call returns or raises, and the gradients and buffers after its step. The third
    finds a model that is not ready."""
    found: list[Any] = []
    for number, call in enumerate(calls):
        torch.manual_seed(number)
        model.ready.fill_(number != 2)
        try:
            out = model(*call)
            loss = (out[0] if isinstance(out, tuple) else out).pow(2).mean()
            loss.backward()
            found.append(out)
        except ValueError as error:
            found.append(str(error))
        found += [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        found += [one.clone() for one in model.buffers()]
        found.append(torch.get_rng_state())
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    "kind",
    [
        ChangesBuffer,
        ChangesValue,
        ChangesAfterNumber,
        ReturnsValue,
        ChecksNumbers,
        CountsSteps,
        ComparesTwice,
        LooksAtDrawn,
        CountsWords,
    ],
)
def test_values_are_looked_at_as_they_are_there(kind: type[Looking]) -> None:
    calls: list[tuple[Tensor, ...]] = [(torch.randn(8, 16),) for _ in range(4)]
    if kind in (ChecksNumbers, CountsWords):
        calls = [(x, torch.full((8,), 11 if i == 2 else i)) for i, (x,) in enumerate(calls)]
    calls[2][0][0, 0] = float("nan")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    expected = trained(models[0], calls)
    memopt.wrap(models[1], "min", strategy="rotor", progress=False, improve=False)
    with pytest.warns(UserWarning, match="a training step ran without its plan"):
        found = trained(models[1], calls)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            assert one == other
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    ran = memopt.running(models[1]).calls
    assert (ran.planned, ran.original) == (3, 1)


def test_a_counting_model_is_planned_for_a_device_that_is_not_here() -> None:
    plan = memopt.plan(
        CountsSteps().to("meta"),
        torch.randn(8, 16, device="meta"),
        strategy="store-all",
        mode="estimate",
        device="H100",
        progress=False,
    )
    assert plan.peak_bytes > 0


def test_a_counting_model_that_looks_in_another_order_is_told_how_to_count() -> None:
    class InAnotherOrder(Looking):
        in_place = False

        def look(self, h: Tensor, *more: Tensor) -> Any:
            bad, good = torch.isnan(h).any().item(), torch.isfinite(h).all().item()
            if not good:
                raise ValueError("not finite")
            if self.in_place:
                self.steps.add_(1)
            else:
                self.steps += 1
            return self.last(h) * 2 if bad else self.last(h)

    model = InAnotherOrder()
    with pytest.raises(memopt.CaptureError, match=r"another order .*in place \(self.steps.add_"):
        memopt.plan(model, torch.randn(8, 16), strategy="store-all", progress=False)
    model.in_place = True
    memopt.plan(model, torch.randn(8, 16), strategy="store-all", progress=False)


class Flips(Looking):
    def forward(self, x: Tensor, *more: Tensor) -> Any:
        h = self.linear(x)
        return h * 2 if h.sum() > 0 else h


def test_a_branch_that_goes_another_way_by_now_is_planned_so() -> None:
    torch.manual_seed(0)
    model, x = Flips(), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    memopt.wrap(model, None, "store-all", progress=False)
    planning, captures = planning_of(model), set[int]()
    assert planning is not None
    for calls in ((4, 0), (6, 2), (8, 4)):
        for _ in range(4):
            outputs = [one(x) for one in (model, twin)]
            assert torch.equal(*outputs)
            outputs[0].sum().backward()
            model.zero_grad()
        counted = memopt.running(model).calls
        assert (counted.planned, counted.original) == calls
        captures |= {id(captured_of(one.module).module) for one in planning.plans.made()}
        with torch.no_grad():
            for parameter in (*model.parameters(), *twin.parameters()):
                parameter.neg_()
    assert len(captures) == 2


class Agrees(Looking):
    """Asks whether inputs, activations and parameters agree."""

    same = False

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        h = self.linear(x)
        self.same = torch.equal(x[0], x[1])
        if torch.allclose(h, h.tanh(), atol=0.5) and not h.equal(self.last(h)):
            h = h * 2
        return h * 3 if self.same or torch.allclose(self.linear.weight, self.last.weight) else h


def test_tensors_that_agree_in_the_example_and_others_that_do_not() -> None:
    torch.manual_seed(0)
    model, x = Agrees(), torch.randn(8, 16)
    alike = x[:1].expand(8, 16).clone()
    twin = copy.deepcopy(model)
    memopt.wrap(model, None, "store-all", progress=False)
    for one in (x, alike, 0.01 * x, x, x):
        assert torch.equal(model(one), twin(one))
        assert model.same is twin.same
    calls = memopt.running(model).calls
    assert (calls.planned, calls.original) == (4, 1)
