"""What Dynamo runs without a graph under `torch.compile(backend="memopt")`: said, never silent."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.integrations.torch_compile import compiled_steps, memopt_backend

WIDTH = 16


class Net(nn.Module):
    """Two blocks, and what a forward does around them."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def in_a_loop(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + block(x)
        if x.abs().max().item() > 1e9:
            x = x / 2
    return x


def after_the_loop(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + block(x)
    return x / 2 if x.abs().max().item() > 1e9 else x


def with_operators(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + block(x)
        x = torch.where(x.abs().max() > 1e9, x / 2, x)
    return x


def in_a_try(net: Net, x: Tensor) -> Tensor:
    try:
        x = net.blocks[0](x)
        torch._dynamo.graph_break()
        return net.blocks[1](x)
    except ValueError:
        return x


@contextlib.contextmanager
def own_context() -> Iterator[None]:
    yield


@torch.compiler.disable  # type: ignore[untyped-decorator]
def left_out(net: Net, x: Tensor) -> Tensor:
    return net.blocks[0](x)


def disabled(net: Net, x: Tensor) -> Tensor:
    return net.blocks[1](left_out(net, x))


def around_a_helper(net: Net, x: Tensor) -> Tensor:
    """Breaks, and a function without tensors, of which nothing could be planned."""
    x = net.blocks[0](x)
    torch._dynamo.graph_break()
    return net.blocks[1](x) * helper()


def helper() -> int:
    torch._dynamo.graph_break()
    return 3


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(body: Callable[[Net, Tensor], Tensor], **options: Any) -> list[str]:
    """Two steps of a compiled model; what it warned of. Their gradients are eager's."""
    torch.manual_seed(0)
    model, x = Net(body), torch.randn(4, WIDTH)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    given = {"budget": "100MiB", "progress": False, **options}
    run = torch.compile(model, backend=memopt_backend, options=given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            run(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    return [str(one.message) for one in caught if "does not plan" in str(one.message)]


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        (in_a_loop, "in_a_loop", "Tensor.item"),
        (in_a_try, "in_a_try", "graph_break"),
        (disabled, "a part of disabled", "wrapped with `torch.compiler.disable`"),
    ],
)
def test_a_part_without_a_graph_is_warned_about_once(
    body: Callable[[Net, Tensor], Tensor], name: str, reason: str
) -> None:
    found = step(body)
    assert any(f"does not plan {name} ({__file__}:" in one and reason in one for one in found)
    assert len(found) <= 2  # the body, and the forward that calls it
    made = compiled_steps()[-1]
    assert any(reason in one.reason for one in made.skipped)
    assert f"not planned: {__file__}:" in made.report()


@pytest.mark.parametrize("body", [in_a_loop, disabled])
def test_strict_refuses(body: Callable[[Net, Tensor], Tensor]) -> None:
    for _ in range(2):
        with pytest.raises(memopt.CaptureError, match="does not plan"):
            step(body, strict=True)


@pytest.mark.parametrize("body", [after_the_loop, with_operators, around_a_helper])
def test_what_is_planned_around_is_not_warned_about(body: Callable[[Net, Tensor], Tensor]) -> None:
    assert step(body, strict=True) == []
    made = compiled_steps()[-1]
    assert made.graphs
    assert not made.skipped


def test_a_wrapped_model_inside_is_planned() -> None:
    model, x = Net(lambda net, x: net.blocks[1](net.blocks[0](x))), torch.randn(4, WIDTH)
    memopt.wrap(model.blocks[0], budget="min", progress=False)
    options = {"progress": False, "strict": True}
    torch.compile(model, backend=memopt_backend, options=options)(x).sum().backward()
    assert model.blocks[0].calls.planned == 1  # type: ignore[union-attr]


def test_too_many_recompilations() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mode = nn.Linear(WIDTH, WIDTH), ""

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if self.mode else x

    model, x = Scaled(), torch.randn(2, WIDTH)
    run = torch.compile(
        model, backend=memopt_backend, options={"strategy": "store-all", "progress": False}
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        model.mode = "one"
        run(x).sum().backward()
        model.mode = "two"
        with pytest.warns(UserWarning, match=r"limit exceeded.*raise torch\._dynamo\.config\.rec"):
            run(x).sum().backward()
    with torch._dynamo.config.patch(recompile_limit=8), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._dynamo.reset()
        for mode in "abc":
            model.mode = mode
            run(x).sum().backward()


def test_under_a_dispatch_mode() -> None:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Counting():
        found = step(with_operators)
    assert any("dispatch mode" in one and "outside of that mode" in one for one in found)


def test_an_error_that_is_suppressed() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        found = step(with_operators, bugdet=3)
    assert any("takes the options budget" in one for one in found)


def test_graphs_without_gradients_are_counted() -> None:
    options = {"progress": False, "budget": "1GiB"}
    model, x = Net(with_operators), torch.randn(4, WIDTH)
    run = torch.compile(model, backend=memopt_backend, options=options)
    model.requires_grad_(False)
    run(x)
    assert compiled_steps()[-1].without_gradients == 1
