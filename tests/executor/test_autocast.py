"""Mixed precision: plans made under autocast, and networks in bfloat16."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils.checkpoint import checkpoint

import memopt
from memopt import GuardError, Plan
from memopt.capture.capture import capture
from memopt.step.captured import Captured
from memopt.step.inputs import to_call
from tests.executor.harness import Case, check

MINIMUM: dict[str, Any] = {"budget": "min", "strategy": "rotor", "progress": False}


class Normed(nn.Module):
    """Every normalisation, each behind an operator that autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.instance = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.linear = nn.Linear(8, 8)
        self.layer = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.first(x)).relu()
        y = self.group(self.second(y)).relu()
        y = self.instance(self.third(y)).relu()
        return self.layer(self.linear(y.mean((2, 3))))


def images(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 4 * 3 * 6 * 6).reshape(4, 3, 6, 6).to(dtype),)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def test_the_bits_of_eager_under_autocast() -> None:
    check(Case(Normed, images, context=autocast))


def test_the_bits_of_eager_in_bfloat16() -> None:
    check(Case(lambda: Normed().bfloat16(), lambda: images(torch.bfloat16)))


class Attends(nn.Module):
    """Attention with dropout, through one projection that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.projection(y).view(2, 12, 2, 8).transpose(1, 2) for y in (x, x + 1, -x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.15)
        return y.transpose(1, 2).flatten(2)


def rows() -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 2 * 12 * 16).reshape(2, 12, 16),)


@pytest.mark.parametrize("kept", [True, False])
def test_parameters_are_cast_once_and_nothing_is_in_the_backward(kept: bool) -> None:
    context = lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=kept)  # noqa: E731
    check(Case(Attends, rows, context=context))


def test_another_way_of_casting_is_refused() -> None:
    model = Attends()
    with autocast():
        planned = memopt.plan(model, rows(), **MINIMUM).apply(model)
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        pytest.raises(GuardError, match="planned with cache_enabled=True"),
    ):
        planned(*rows())


def test_a_backward_under_autocast_is_warned_of_once() -> None:
    model = Attends()
    with autocast():
        planned = memopt.plan(model, rows(), **MINIMUM).apply(model)
        with pytest.warns(UserWarning, match=r"Call backward\(\) after the `with`"):
            planned(*rows()).sum().backward()
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            planned(*rows()).sum().backward()
    model.zero_grad()
    planned = memopt.plan(model, rows(), **MINIMUM).apply(model)
    loss = planned(*rows()).sum()
    with autocast(), pytest.warns(UserWarning, match=r"Call backward\(\) after the `with`"):
        loss.backward()


def layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return tuple(layout(one) for one in value) if isinstance(value, (tuple, list)) else None


class Compared(Interpreter):
    """Runs a captured graph and lists the kernels whose results are not as described."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.module)
        self.wrong: list[tuple[str, Any, Any]] = []

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if n.op == "call_function" and n.target is not operator.getitem:
            described = layout(n.meta["val"])
            if layout(found) != described:
                self.wrong.append((str(n.target), described, layout(found)))
        return found


@pytest.mark.parametrize(
    ("dtype", "context"),
    [
        (torch.float32, contextlib.nullcontext),
        (torch.bfloat16, contextlib.nullcontext),
        (torch.float32, autocast),
    ],
)
def test_the_graph_describes_what_the_kernels_return(
    dtype: torch.dtype, context: Callable[[], Any]
) -> None:
    model = Normed().to(dtype)
    call = to_call(images(dtype))
    with context():
        captured = capture(model, call)
    values = [p.value(model, call.leaves).detach().clone() for p in captured.primals]
    tangents = [torch.ones_like(t.meta["val"], device="cpu") for t in captured.tangents]
    given = iter([*values, *(torch.ones(t.shape, dtype=t.dtype) for t in tangents)])
    compared = Compared(captured)
    with torch.no_grad():
        compared.run(*given)
    assert compared.wrong == []


@pytest.fixture(scope="module")
def plan() -> Plan:
    with autocast():
        return memopt.plan(Normed(), images(), strategy="rotor", progress=False)


def digest(module: nn.Module, model: nn.Module) -> list[Tensor]:
    with autocast():
        loss = module(*images()).float().square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("saved", [False, True])
def test_a_plan_is_applied_outside_of_autocast(plan: Plan, saved: bool, tmp_path: Path) -> None:
    """As training loops are written: only the forward is inside."""
    torch.manual_seed(0)
    model = Normed()
    expected = digest(model, model)
    torch.manual_seed(0)
    model = Normed()
    if saved:
        plan.save(tmp_path / "plan.json")
        plan = memopt.load(tmp_path / "plan.json")
    found = digest(plan.apply(model, images()), model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_autocast_it_is_refused(plan: Plan) -> None:
    planned = plan.apply(Normed(), images())
    with pytest.raises(GuardError, match=r"autocast: planned \('bfloat16', None\), got \(None"):
        planned(*images())


def test_a_whole_step_under_autocast() -> None:
    def trained(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn: Callable[[Tensor], Tensor] = lambda y: y.float().square().mean()  # noqa: E731
        if planned:
            with autocast():
                plan = memopt.plan(
                    model,
                    images(),
                    loss_fn=loss_fn,
                    optimizer=optimizer,
                    strategy="rotor",
                    whole_step=True,
                    progress=False,
                )
            step = plan.train_step(model, loss_fn, optimizer)
        for _ in range(2):
            if planned:
                with autocast():
                    step(*images())
                continue
            with autocast():
                loss = loss_fn(model(*images()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


class PartlyCast(nn.Module):
    """A product that autocast leaves alone, between two that it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).float()
        with torch.autocast("cpu", enabled=False):
            y = y @ y.t()
        return self.after(y)


def test_kernels_are_measured_as_they_run() -> None:
    """Measured under the user's autocast, the product had half its bytes, and its address was
    another tensor's, too."""
    torch.manual_seed(0)
    model, x = PartlyCast(), torch.randn(8, 8)
    with autocast():
        plan = memopt.plan(model, x, strategy="olla", cache=False, progress=False)
        step = plan.apply(model)
        found = step(x)
        expected = model(x)
    products = {op.writes[0] for op in plan.graph.operators if op.target.startswith("aten.mm")}
    assert sorted(plan.graph.tensors[t].size_bytes for t in products)[-1] == 8 * 8 * 4
    assert torch.equal(found, expected)


class RoundedInside(nn.Module):
    """Kernels of products, for which autocast has no rule; where it is on and where it is off, and
    in a part that is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(3, 4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = self.bilinear(x, y)
        with torch.no_grad():
            inverse = torch.linalg.pinv(y).float()
        z = checkpoint(self.bilinear, x, y, use_reentrant=False)
        return z * exact.detach() + self.bilinear(inverse.mT[:, :3], y)


def test_what_autocast_rounds_inside_kernels() -> None:
    def inputs() -> tuple[Tensor, ...]:
        y = torch.linspace(-1, 3, 32).square().cos().reshape(8, 4)  # of full rank
        return torch.linspace(-2, 2, 24).reshape(8, 3), y

    check(Case(RoundedInside, inputs, context=autocast, steps=1))


class Counting(nn.Module):
    """Updates a buffer, which has the forward run on fake tensors once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x)


def test_no_fake_casts_are_left_while_a_loss_is_measured() -> None:
    """They were another model's outputs, of no bytes: the loss was charged nothing."""
    model, x = Counting(), torch.randn(6, 8)
    loss = lambda output: output.float().square().sum()  # noqa: E731
    with autocast():
        plan = memopt.plan(model, x, loss_fn=loss, strategy="store-all", progress=False)
    # Of bfloat16 a float32 copy, kept for its square, and the square.
    assert plan.graph.boundary_bytes >= 2 * 6 * 8 * 4 - 6 * 8 * 2


class Products(nn.Module):
    """Products, which autocast computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * 2
        return y.prod(-1, keepdim=True) + y.cumprod(0) + y.prod() * 1e-9


def test_the_gradient_of_a_product_is_rounded_as_in_eager() -> None:
    """Its backward repeats the forward outside of autocast."""
    check(Case(Products, lambda: (torch.randn(6, 8),), context=autocast, steps=1))
