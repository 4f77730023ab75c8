"""`torch.utils.checkpoint` inside a forward, however it is called."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import memopt

OPS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in OPS else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(policy)


class Contexts:
    """What may be called, and a method that may be."""

    def __call__(self) -> Any:
        return contexts()

    def made(self) -> Any:
        return contexts()


class Net(nn.Module):
    """A block under a checkpoint."""

    def __init__(self, call: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.contexts, self.call = Contexts(), call

    def own(self) -> Any:
        return contexts()

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def nested(net: Net, x: Tensor) -> Tensor:
    """As torchtitan has it: contexts and policy are made where the block is called."""
    saved = tuple(OPS)

    def own_policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keeps = op in saved
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def made() -> Any:
        return create_selective_checkpoint_contexts(own_policy)

    return checkpoint(net.block, x, use_reentrant=False, context_fn=made)  # type: ignore[no-any-return]


def with_contexts(choose: Callable[[Net], Callable[[], Any]]) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: checkpoint(net.block, x, use_reentrant=False, context_fn=choose(net))


CALLS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "function": with_contexts(lambda _net: contexts),
    "partial": with_contexts(
        lambda _net: functools.partial(create_selective_checkpoint_contexts, OPS)
    ),
    "lambda": with_contexts(lambda _net: lambda: contexts()),
    "nested": nested,
    "method": with_contexts(lambda net: net.own),
    "method of another": with_contexts(lambda net: net.contexts.made),
    "object": with_contexts(lambda net: net.contexts),
    "none": with_contexts(lambda _net: noop_context_fn),
    "debug": lambda net, x: checkpoint(net.block, x, use_reentrant=False, debug=True),
    "early stop": lambda net, x: checkpoint(net.block, x, use_reentrant=False, early_stop=False),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_checkpoint_is_planned_however_it_is_called(how: str) -> None:
    torch.manual_seed(0)
    model, x = Net(CALLS[how]), torch.randn(2, 4)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    plan = memopt.plan(model, x, strategy="store-all", progress=False)
    plan.apply(model)(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_contexts_of_values_of_the_forward_are_refused() -> None:
    def call(net: Net, x: Tensor) -> Tensor:
        def made() -> Any:
            assert x.shape
            return contexts()

        return checkpoint(net.block, x, use_reentrant=False, context_fn=made)  # type: ignore[no-any-return]

    with pytest.raises(memopt.CaptureError, match=r"made, which is made in the .*checkpoint out"):
        memopt.plan(Net(call), torch.randn(2, 4), progress=False)


def test_contexts_that_no_graph_holds_are_refused() -> None:
    def none() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    model = Net(with_contexts(lambda _net: none))
    with pytest.raises(memopt.CaptureError, match=r"none, which does not make the two .* out"):
        memopt.plan(model, torch.randn(2, 4), progress=False)


def test_checkpoint_sequential_is_refused_with_a_remedy() -> None:
    model = Net(lambda net, x: checkpoint_sequential(net.block, 2, x, use_reentrant=False))
    with pytest.raises(memopt.CaptureError, match=r"checkpoint_sequential.*one after another"):
        memopt.plan(model, torch.randn(2, 4), progress=False)


def looks(h: Tensor, mask: Tensor) -> Tensor:
    """Branches on activations, computes with their numbers, and selects by an input's mask."""
    if torch.isinf(h).any():
        h = h.clamp(-100, 100)
    h = h / h.detach().abs().max().item()
    h = torch.sin(h) if h.detach().mean() > 0 else torch.cos(h)
    assert not torch.isnan(h).any(), "not a number"
    return torch.dropout(h[mask], 0.3, True) * int(mask.sum())


def nests(h: Tensor, mask: Tensor) -> Any:
    """A reentrant checkpoint gives a gradient to the first and the last alone."""
    return h.sin(), {"cos": h.cos(), "kinds": [h.exp(), (h.tanh(),)]}, None, h * mask.sum()


def nests_looking(h: Tensor, mask: Tensor) -> Any:
    return nests(h * 2 if (h > 1e3).any() else h, mask)


def tensors_of(found: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(found) if one is not None]


class Looking(nn.Module):
    def __init__(self, function: Callable[..., Any], reentrant: bool, given: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.function, self.reentrant, self.given = function, reentrant, given

    def block(self, h: Tensor, mask: Tensor) -> Any:
        return self.function(self.inner(h), mask)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x if self.given else self.first(x)
        found = checkpoint(self.block, h, mask, use_reentrant=self.reentrant)
        total: Tensor = sum(one.sum() for one in tensors_of(found))
        return self.last(self.first(x)) * total


@pytest.mark.parametrize(
    ("function", "reentrant", "given"),
    [
        (looks, False, False),
        (looks, True, False),
        (nests, False, False),
        (nests, True, False),
        (nests, True, True),
        (nests_looking, True, False),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_is_checkpointed_looks_at_values_and_gets_its_gradients(
    function: Callable[..., Any], reentrant: bool, given: bool
) -> None:
    torch.manual_seed(0)
    model = Looking(function, reentrant, given)
    twin = copy.deepcopy(model)
    memopt.wrap(model, progress=False)
    for step in range(3):
        found = []
        for one in (twin, model):
            torch.manual_seed(step)
            one(torch.randn(3, 4), torch.tensor([True, step > 1, True])).sum().backward()
            found.append([*(p.grad for p in one.parameters()), torch.get_rng_state()])
            one.zero_grad()
        for expected, gradient in zip(*found, strict=True):
            if expected is None or gradient is None:
                assert expected is gradient
            else:
                assert torch.equal(expected, gradient)
    assert memopt.running(model).calls.planned == 3


@pytest.mark.parametrize("kept", ["count", "features"])
def test_changes_in_a_checkpoint_that_looks_at_values_are_refused(kept: str) -> None:
    def block(h: Tensor, _mask: Tensor) -> Tensor:
        if kept == "count":
            model.count += 1
        else:
            model.features.append(h)
        return h * 2 if (h > 1e3).any() else h

    model = Looking(block, False, False)
    model.count, model.features = 0, []
    with pytest.raises(memopt.CaptureError, match="a checkpointed block changes a Python object"):
        memopt.plan(model, (torch.randn(3, 4), torch.ones(3) > 0), progress=False)


class ResultsOfOneCheckpoint(nn.Module):
    """Two results of each checkpoint, of which not all are used."""

    def __init__(self, looks: bool, used: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))
        self.looks, self.used = looks, used

    def block(self, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.looks and (h > 1e3).any():
            h = h * 2
        return F.dropout(self.one(h), 0.3), self.other(h).sin()

    def forward(self, x: Tensor) -> Any:
        return self.used(*checkpoint(self.block, self.first(x), use_reentrant=True))


def nested_pairs(model: ResultsOfOneCheckpoint) -> ResultsOfOneCheckpoint:
    block = model.block
    model.block = lambda h: checkpoint(block, h, use_reentrant=True)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("nests", [False, True])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(
    ("used", "planned"),
    [
        (lambda one, other: (one, other), 2),
        (lambda one, other: (one * 2,), 3),
        (lambda one, other: (one.relu_(),), 3),
    ],
)
def test_what_a_reentrant_checkpoint_computes_in_vain_gets_zeros(
    used: Callable[..., Any], planned: int, looks: bool, nests: bool
) -> None:
    """It got None, so that an optimizer's momentum and decay passed it by, and a backward from one
    of two outputs was torch's error."""
    torch.manual_seed(0)
    model = ResultsOfOneCheckpoint(looks, used)
    twin = copy.deepcopy(model)
    for one in (model, twin) if nests else ():
        nested_pairs(one)
    memopt.wrap(model, None, progress=False)
    for step in range(3):
        for one in (twin, model):
            torch.manual_seed(step)
            x = torch.randn(3, 4, requires_grad=True)
            one(x.sin())[0].square().sum().backward()
            one.given = x.grad
        assert torch.equal(twin.given, model.given)
        for expected, found in zip(twin.parameters(), model.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert torch.equal(expected.grad, found.grad)
            expected.grad = found.grad = None
    assert memopt.running(model).calls.planned == planned
