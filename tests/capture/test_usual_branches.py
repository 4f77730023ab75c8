"""A forward with data-dependent branches is planned with their usual outcome, and runs unplanned
where a branch goes the other way."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Distribution,
    Independent,
    Normal,
    kl_divergence,
)
from torch.distributions.kl import _KL_MEMOIZE

import memopt
from memopt.capture.answers import Answering, Looking
from memopt.errors import CaptureError, ExecutionError
from memopt.executor.module import PlannedModule
from memopt.executor.runtime import Runtime
from memopt.step.inputs import Call
from memopt.torch_private.branches import branches_decided
from tests.capture.checking import CHECKS, Checking, asserts, raises

CLAMPED = 100.0


class Block(nn.Module):
    """Looks whether its values are finite, as Hugging Face's detection models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.more = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.more(self.norm(self.linear(x)).relu())
        if self.training and not torch.isfinite(h).all():
            h = torch.clamp(h, min=-CLAMPED, max=CLAMPED)
        if torch.isinf(h).any() or torch.isnan(h).any().item():
            h = torch.nan_to_num(h)
        bad = not (~torch.isnan(h)).all()
        return h * 2 if bad else h


def run(make: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """Losses, gradients, buffers and a random number of six steps; in one the values are not
    finite."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    called = make(model)
    torch.manual_seed(1)
    found = []
    for step in range(6):
        x = torch.randn(8, 16)
        if step == 3:
            x[0, 0] = float("inf")
        loss = called(x).pow(2).mean()
        loss.backward()
        found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
        model.zero_grad()
    return [*found, *(one.clone() for one in model.buffers()), torch.rand(3)]


def mean_square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> memopt.Plan:
    return memopt.plan(
        model,
        torch.randn(8, 16),
        budget="min",
        strategy="rotor",
        loss_fn=mean_square,
        optimizer=optimizer,
        whole_step=True,
        progress=False,
    )


def planned(model: nn.Module) -> PlannedModule:
    plan = memopt.plan(model, torch.randn(8, 16), budget="min", strategy="rotor", progress=False)
    return plan.apply(model)


def wrapped(model: nn.Module) -> nn.Module:
    memopt.wrap(model, "min", strategy="rotor", progress=False, improve=False)
    return model


@pytest.mark.parametrize("make", [planned, wrapped])
def test_a_step_whose_values_are_not_finite_runs_unplanned(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    made: list[nn.Module] = []

    def kept(model: nn.Module) -> nn.Module:
        made.append(make(model))
        return made[0]

    expected = run(lambda model: model)
    said = r"isfinite.*that is False in this call, and planned as True.*torch\.where"
    with pytest.warns(UserWarning, match=said):
        found = run(kept)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    calls = memopt.running(made[0]).calls
    assert (calls.planned, calls.original) == (5, 1)


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_fails_as_without_memopt(check: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Checking(check), Checking(check))
    bad = torch.randn(8, 16)
    bad[0, 0] = -1000.0
    with pytest.raises((AssertionError, ValueError, RuntimeError), match="too small") as eager:
        model(bad)
    step = planned(model)
    step(torch.randn(8, 16)).sum().backward()
    assert step.calls.planned == 1
    state = torch.get_rng_state()
    with (
        pytest.warns(UserWarning, match="a check in the forward fails"),
        pytest.raises(type(eager.value), match="too small"),
    ):
        step(bad)
    assert torch.equal(torch.get_rng_state(), state)
    step(torch.randn(8, 16)).sum().backward()
    assert (step.calls.planned, step.calls.original) == (2, 1)


class Autoencoder(nn.Module):
    """A variational autoencoder whose distributions check their parameters and values."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.encoder(x).chunk(2, -1)
        latent = Normal(mean, deviation.exp())
        code = latent.rsample() * Beta(0.8, 0.8).sample()
        decoded = Independent(Bernoulli(logits=self.decoder(code)), 1)
        kl = kl_divergence(latent, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        loss: Tensor = kl.sum() - decoded.log_prob((x > 0).float()).sum()
        return loss


@pytest.mark.parametrize("known", [False, True])
def test_distributions_are_planned_with_their_checks(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # a torch.compile turns it off

    def trained(make: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Autoencoder()
        called = make(model)
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            loss = called(torch.randn(8, 16))
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
            model.zero_grad()
        with pytest.raises(ValueError, match="Expected parameter loc"):
            called(torch.full((8, 16), float("nan")))
        return found

    if not known:  # torch keeps the divergences that were looked up
        _KL_MEMOIZE.clear()
    expected = trained(lambda model: model) if known else []
    with pytest.warns(UserWarning, match="a check in the forward fails"):
        found = trained(planned)
    expected = expected or trained(lambda model: model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_check_fails_in_a_whole_step_before_anything_changes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Checking(asserts), nn.BatchNorm1d(16), Checking(raises))
    optimizer = torch.optim.Adam(model.parameters())
    plan = whole_step(model, optimizer)
    step = plan.train_step(model, mean_square, optimizer)
    step(torch.randn(8, 16))
    bad = torch.randn(8, 16)
    bad[0, 0] = -1000.0
    before = [one.clone() for one in model.state_dict().values()]
    state = torch.get_rng_state()
    with pytest.raises(ExecutionError, match="a check in the forward fails: assert"):
        step(bad)
    after = model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    step(torch.randn(8, 16))


class InTransform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Checking(asserts), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda one: self.inner(one).sum())(x)
        return slope + self.inner[1](x)


def test_what_is_not_looked_at_is_said() -> None:
    model = nn.Sequential(InTransform(), nn.Linear(16, 16))
    with pytest.warns(UserWarning, match="leave out a check of values.*in a function"):
        step = planned(model)
    step(torch.randn(8, 16)).sum().backward()
    assert step.calls.planned == 1


class Counting(nn.Module):
    """Checks a buffer that it then changes, and the same value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        finite = torch.isfinite(x).all()
        if self.calls > 100:
            raise ValueError("called too often")
        if not finite:
            raise ValueError("not finite")
        self.calls.add_(1)
        h: Tensor = self.linear(x)
        return h if finite else h * 2


def test_a_value_is_looked_at_as_it_was() -> None:
    model = Counting()
    step = planned(nn.Sequential(model, nn.Linear(16, 16)))
    model.calls.fill_(100)
    step(torch.randn(8, 16)).sum().backward()
    assert step.calls.planned == 1
    assert int(model.calls) == 101
    with (
        pytest.raises(ValueError, match="too often"),
        pytest.warns(UserWarning, match="self.calls"),
    ):
        step(torch.randn(8, 16))
    model.calls.fill_(0)
    with pytest.raises(ValueError, match="not finite"):
        step(torch.full((8, 16), float("inf")))
    assert int(model.calls) == 0
    step(torch.randn(8, 16)).sum().backward()
    assert (step.calls.planned, step.calls.original) == (2, 2)


class Cutting(nn.Module):
    """Cuts and pads by a number in a buffer."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.linear, self.moves = nn.Linear(16, 16), moves
        self.register_buffer("width", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)[:, : self.width]
        h = torch.nn.functional.pad(h, (int(self.width), 0))
        if self.moves:
            self.width += 1
        return h


def test_sizes_are_those_in_a_buffer() -> None:
    model = Cutting()
    step, x = planned(model), torch.randn(8, 16)
    assert step(x).shape == (8, 10)
    assert torch.equal(step(x), model(x))
    model.width.fill_(6)
    with pytest.warns(UserWarning, match=r"self\.width"):
        assert step(x).shape == (8, 12)
    assert (step.calls.planned, step.calls.original) == (2, 1)
    with pytest.raises(CaptureError, match=r"a number of a buffer that decides.*index_copy_"):
        planned(Cutting(moves=True))


class Masked(nn.Module):
    """Selects by a mask in a buffer, and asserts what is no tensor."""

    def __init__(self, select: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.select = nn.Linear(16, 16), select
        self.register_buffer("mask", torch.arange(16) % 3 == 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = (self, [self.mask])
        assert kept, "nothing is kept"
        h: Tensor = self.linear(x)
        return self.select(h, self.mask)


def merged(h: Tensor, mask: Tensor) -> Tensor:
    """As a coupling of a normalizing flow merges its halves."""
    some, rest = mask.nonzero().squeeze(-1), (~mask).nonzero().squeeze(-1)
    found = h.new_empty(h.shape)
    found[..., some] = h[..., some].exp()
    found[..., rest] = h[..., rest]
    return found


@pytest.mark.parametrize(
    "select",
    [
        lambda h, mask: h[:, mask],
        lambda h, mask: h * h.detach().masked_select(mask.expand_as(h)).sum(),
        lambda h, mask: h[:, torch.where(mask)[0]].tanh(),
        lambda h, mask: h.repeat_interleave(mask.long() + 1, 1),
        lambda h, mask: sum(h[:, place] for place in mask.nonzero()),
        merged,
    ],
)
def test_selections_are_those_of_a_buffer(select: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Masked(select)
    step, x = planned(model), torch.randn(8, 16)
    for changed in (False, False, True):
        model.mask[0] = changed
        results = step(x), model(x)
        assert torch.equal(*results)
        expected, found = (torch.autograd.grad(one.sum(), model.linear.weight) for one in results)
        assert torch.equal(*expected, *found)
    assert (step.calls.planned, step.calls.original) == (2, 1)


def test_a_layer_that_takes_the_selected_alone() -> None:
    model = Masked(lambda h, mask: nn.functional.linear(h[:, mask], h.new_ones(2, 5) / 3))
    x = torch.randn(8, 16)
    assert torch.equal(planned(model)(x), model(x))


def test_another_thread_compiles_as_ever() -> None:
    found: list[BaseException] = []

    def compiled() -> None:
        try:
            torch.compile(Checking(raises), fullgraph=True, backend="eager")(torch.randn(8, 16))
        except RuntimeError as error:
            found.append(error)

    answers = Answering(Checking(raises), Call((), {}), Looking())
    with branches_decided(answers) as branches:
        thread = threading.Thread(target=compiled)
        thread.start()
        thread.join()
    assert "Data-dependent branching" in str(found[0])
    assert branches.met == []


class Deciding(Block):
    """Branches on activations and parameters in ways that no rule tells."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.linear(x))
        if (h != h).any() or torch.isfinite(h).all() == False:  # noqa: E712
            h = torch.nan_to_num(h)
        if not math.isfinite(float(h.sum())) or math.isnan(h.mean().item()):
            return h * 0
        if h.abs().sum().item() == 0 or self.linear.weight.norm() > 1000:
            h = h + 1
        h = self.more(h)
        big = x.abs().max() > 100 and h
        if h.abs().max().item() / 2 > 20 and not (h.mean() < -1e9):
            warnings.warn("large", stacklevel=1)
            h = h / 2
        while h.abs().max() > 30:
            h = h / 4
        return h if big is not h else h * 3


@pytest.mark.parametrize("make", [planned, wrapped])
def test_branches_go_as_they_went_for_the_example(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    def trained(make: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Deciding()
        with torch.no_grad():
            model.more[0].weight.mul_(3)
        called.append(make(model))
        torch.manual_seed(1)
        found = []
        for step in range(6):
            if step == 3:
                with torch.no_grad():
                    model.more[0].weight.mul_(30)
            loss = called[-1](torch.randn(8, 16)).pow(2).mean()
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
            model.zero_grad()
            if step == 3:
                with torch.no_grad():
                    model.more[0].weight.div_(30)
        return [*found, *(one.clone() for one in model.buffers()), torch.rand(3)]

    called: list[nn.Module] = []
    with pytest.warns(UserWarning, match="large") as heard:
        expected = trained(lambda model: model)
    times = [str(one.message) for one in heard].count("large")
    assert times == 1
    with pytest.warns(UserWarning, match="a branch of the forward depends on a value") as heard:
        found = trained(make)
    assert [str(one.message) for one in heard].count("large") == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    calls = memopt.running(called[1]).calls
    assert (calls.planned, calls.original) == (5, 1)


class Flipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return h * 2 if h.sum() > 0 else h


def test_a_plan_whose_branches_go_otherwise_is_seldom_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Flipping()
    x = torch.randn(8, 16)
    x = x if model.linear(x).sum() > 0 else -x
    step = memopt.plan(model, x, budget="min", strategy="rotor", progress=False).apply(model)
    tried, run = list[bool](), Runtime.run

    def heard(*args: Any) -> Any:
        tried.append(True)
        return run(*args)

    monkeypatch.setattr(Runtime, "run", heard)
    step(x).sum().backward()
    with torch.no_grad():
        model.linear.weight.neg_()
        model.linear.bias.neg_()
    with pytest.warns(UserWarning, match="a branch of the forward depends on a value"):
        assert all(torch.equal(step(x), model(x)) for _ in range(100))
    assert (step.calls.planned, step.calls.original, len(tried)) == (1, 100, 10)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.rand(()) > 0.5 else x


def test_a_branch_by_chance_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Drawing(), nn.Linear(16, 16))
    with pytest.raises(CaptureError, match=r"data-dependent.*torch\.where"):
        planned(model)
