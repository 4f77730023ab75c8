"""Equal blocks are traced once: the graph and what it relies on are as if each had been traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.capture import trace
from memopt.capture.as_eager.corrections import tracing_as_eager
from memopt.capture.lean_trace import lean_trace
from memopt.capture.regions import forwards_of_blocks
from memopt.step.inputs import Call
from memopt.torch_private.regions import has_regions

pytestmark = pytest.mark.skipif(not has_regions(), reason="this torch reuses no regions")


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.rate, self.scale = number, 0.1, 0.5
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, more: dict[str, Tensor], turns: Tensor | None = None) -> Tensor:
        y = self.up(self.norm(x)) * self.scale
        y = nn.functional.dropout(torch.relu(y), self.rate, self.training)
        return x + self.down(y) + more["bias"]


class Deep(nn.Module):
    def __init__(self, depth: int = 9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(depth))
        self.bias = nn.Parameter(torch.randn(8))
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.forwards = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with self.around() if block.number == 3 else nullcontext():
                run = block.forward if self.forwards else block
                x = run(x, more={"bias": self.bias})
        return x.square().mean()


def _unchanged(_model: Deep) -> None:
    pass


def _frozen(model: Deep) -> None:
    model.blocks[3].requires_grad_(False)


def _other_rate(model: Deep) -> None:
    model.blocks[3].rate = 0.3


def _hooked(model: Deep) -> None:
    model.blocks[3].up.register_forward_hook(lambda _m, _args, output: output * 2)


def _other_forward(model: Deep) -> None:
    block: Any = model.blocks[3]
    block.forward = lambda x, more: x * 2 + more["bias"]


def _other_width(model: Deep) -> None:
    model.blocks[3].up, model.blocks[3].down = nn.Linear(8, 24), nn.Linear(24, 8)


def _tied(model: Deep) -> None:
    model.blocks[3].up.weight = model.blocks[2].up.weight


def _tied_inside(model: Deep) -> None:
    """The second block is the first that others are compared with."""
    model.blocks[1].norm.bias = model.blocks[1].down.bias


def _tied_with_the_first(model: Deep) -> None:
    model.blocks[1].up = model.blocks[0].up


def _tied_with_an_argument(model: Deep) -> None:
    model.blocks[1].down.bias = model.bias


def _in_eval(model: Deep) -> None:
    model.blocks[3].eval()


def _without_gradients(model: Deep) -> None:
    model.around = torch.no_grad


def _in_half_precision(model: Deep) -> None:
    model.around = lambda: torch.autocast("cpu", torch.bfloat16)


def _checkpointed(model: Deep) -> None:
    block: Any = model.blocks[3]
    plain = block.forward
    block.forward = lambda x, more: checkpoint(plain, x, more, use_reentrant=False)


def _hooked_each(model: Deep) -> None:
    """Dynamo then calls each block's forward as a method."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _m, _args: None)
        block.register_forward_hook(lambda _m, _args, output: output + 1)
    _other_rate(model)


def _called_by_methods(model: Deep) -> None:
    model.forwards = True
    _other_rate(model)


OTHERS = (
    _unchanged,
    _frozen,
    _other_rate,
    _hooked,
    _hooked_each,
    _called_by_methods,
    _other_forward,
    _other_width,
    _tied,
    _tied_inside,
    _tied_with_the_first,
    _tied_with_an_argument,
    _in_eval,
    _checkpointed,
    _without_gradients,
    _in_half_precision,
)


def _traced(model: nn.Module, x: Tensor, once: bool) -> tuple[Any, set[str], int]:
    """Return the operators of a trace with all that is known of them, what it relies on, and how
    many regions it had."""
    regions: list[int] = []

    def written_out(module: Any) -> None:
        target = torch.ops.higher_order.invoke_subgraph
        regions.append(len(module.graph.find_nodes(op="call_function", target=target)))
        write_out(module)

    write_out = trace.write_out
    chosen = forwards_of_blocks if once else lambda _model: frozenset()
    with (
        mock.patch.object(trace, "forwards_of_blocks", chosen),
        mock.patch.object(trace, "write_out", written_out),
        tracing_as_eager(torch.device("cpu")),
        lean_trace(),
    ):
        module, dependencies = trace.trace_of(model, Call((x,), {}))
    places: dict[Node, Any] = {}
    operators: list[Any] = []
    for node in module.graph.nodes:
        places[node] = str(node.target) if node.op == "get_attr" else len(operators)
        if node.op != "get_attr":
            value = node.meta.get("example_value")
            known = torch.fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
            layout = (
                (value.shape, value.stride(), value.dtype, value.requires_grad)
                if isinstance(value, Tensor)
                else None
            )
            stack = list(node.meta.get("nn_module_stack", {}).values())
            operators.append((node.op, str(node.target), known, layout, stack))
    looks = {re.sub(r"global_\d+", "global", str(one.look)) for one in dependencies.items}
    return operators, looks, regions[-1]


@pytest.mark.parametrize("change", OTHERS)
def test_a_trace_is_as_if_every_block_had_been_traced(change: Callable[[Deep], None]) -> None:
    model = Deep()
    change(model)
    x = torch.randn(4, 8)
    whole, known, none = _traced(model, x, once=False)
    found, told, regions = _traced(model, x, once=True)
    assert found == whole
    assert known <= told
    assert (none, regions > 0) == (0, change not in (_hooked_each, _called_by_methods))


class Told(Block):
    told: Any

    def forward(self, x: Tensor, other: Any = 0, function: Any = torch.relu) -> Tensor:
        rate = self.told.rate * self.told.rates[0] * (2.0 if "odd" in self.told.names else 1.0)
        return x + rate * self.down(function(self.up(self.norm(x)))) + other


class Telling(nn.Module):
    """Tells each block something by another way than its tensors."""

    class All:
        def __init__(self) -> None:
            self.rate, self.rates, self.names = 1.0, [1.0], {"even": 1.0}

    def __init__(self, way: str) -> None:
        super().__init__()
        self.told, self.way = Telling.All(), way
        self.blocks = nn.ModuleList(Told(number) for number in range(9))
        for block in self.blocks:
            block.__dict__["told"] = self.told

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for number, block in enumerate(self.blocks):
            given: dict[str, Any] = {}
            match self.way:
                case "attribute":
                    self.told.rate = number % 3 + 1.0
                case "item":
                    self.told.rates[0] = number % 3 + 1.0
                case "key":
                    self.told.names["odd" if number % 2 else "even"] = self.told.names.popitem()[1]
                case "the same tensor":
                    given["other"] = x if number % 2 else before
                case "function" if number % 2:
                    given["function"] = torch.tanh
            before, x = x, block(x, **given)
        self.told.rate, self.told.rates[0] = 1.0, 1.0
        return x.square().mean()


@pytest.mark.parametrize(
    "way", ["attribute", "item", "key", "the same tensor", "function", "nothing"]
)
def test_what_a_block_is_told_otherwise_is_traced(way: str) -> None:
    model, x = Telling(way), torch.randn(4, 8)
    whole, _, _ = _traced(model, x, once=False)
    found, _, regions = _traced(model, x, once=True)
    assert found == whole
    assert regions or way in ("attribute", "item")  # then all blocks are traced


def test_a_block_that_changes_later_is_noticed() -> None:
    model, x = Deep(), torch.randn(4, 8)
    planned = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    planned(x).backward()
    model.blocks[5].scale = 2.0
    with pytest.raises(memopt.MemoptError, match=r"blocks.*5.*scale"):
        planned(x)


class Made(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for number in range(4):
            x = _Scaled(1.0 + number)(self.blocks[number](x, more={"bias": self.bias}))
        return x.square().mean()


class _Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(4))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_module_that_the_forward_makes_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Made(), torch.randn(4, 8)
    codes = frozenset({Block.forward.__code__, _Scaled.forward.__code__})
    whole, _, _ = _traced(model, x, once=False)
    monkeypatch.setitem(globals(), "forwards_of_blocks", lambda _model: codes)
    found, _, regions = _traced(model, x, once=True)
    assert found == whole
    assert regions > 0


def test_only_lists_of_blocks_are_regions() -> None:
    assert forwards_of_blocks(Deep()) == {Block.forward.__code__}
    few = nn.ModuleList(Deep().blocks[:3])
    assert not forwards_of_blocks(few)
    assert not forwards_of_blocks(nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)]))


def test_blocks_of_many_kinds_are_no_regions() -> None:
    """As with drop paths, whose rates rise from block to block: each would be traced anyhow, with
    a region around it. Two kinds in turn are regions."""
    model = Deep()
    for place, block in enumerate(model.blocks):
        block.rate = 0.1 * (place % 2)
    assert forwards_of_blocks(model) == {Block.forward.__code__}
    for place, block in enumerate(model.blocks):
        block.rate = 0.01 * place
    assert not forwards_of_blocks(model)


def test_blocks_that_know_what_holds_them_are_traced() -> None:
    model = Deep()
    for block in model.blocks:
        vars(block.up)["owner"] = block
    x = torch.randn(4, 8)
    whole, known, _ = _traced(model, x, once=False)
    assert _traced(model, x, once=True) == (whole, known, 0)
