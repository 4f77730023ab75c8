"""Equal blocks traced once give the graph that a whole trace gives, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import memopt
from memopt.capture import block_copies, equal_blocks
from memopt.capture import capture as capturing
from memopt.errors import CaptureError
from memopt.models.periods import Period, longest_period
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.step.memory_layout import storage_of
from memopt.step.nodes import module_paths, tensors_of

WIDTH = 8
DEPTH = 11


class Residual(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU())
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Gated(nn.Module):
    """All blocks share a gate and a weight, whose gradients sum over the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        for block in self.blocks:
            x = x + gate * torch.tanh(block(x)) * self.scale
        return x


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 > 0) for i in range(22))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) if number % 2 else torch.sigmoid(block(x)) + x
        return x


class TwoCarried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for block in self.blocks:
            x, before = torch.tanh(block(x)) + before, x * 2
        return x + before


class TwoRuns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = x + torch.tanh(block(x))
        for block in self.second:
            x = torch.relu(block(x))
        return x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def first_frozen() -> nn.Module:
    model = Residual(13)
    model.blocks[:3].requires_grad_(False)
    return model


def biases_alone() -> nn.Module:
    model = Residual()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    return model


FOLDED: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "gated": Gated,
    "alternating": Alternating,
    "two-carried": TwoCarried,
    "two-runs": TwoRuns,
    "encoder": encoder,
    "first-frozen": first_frozen,
    "biases-alone": biases_alone,
    "bfloat16": lambda: Residual().bfloat16(),
}


class Skips(nn.Module):
    """The second half reads what the first half made, the latest first."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = torch.tanh(block(x))
            kept.append(x)
        for block in self.up:
            x = torch.relu(block(x)) + kept.pop()
        return x


class AllStates(Residual):
    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(states[-1] + block(states[-1]))
        return self.head(torch.stack(states).mean(0))


class Scaled(Residual):
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x) * (0.1 * number)
        return self.head(x)


class Updating(Residual):
    """Each block counts in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            made = block(x)
            block.seen.add_(made.detach().mean(0))
            x = x + made
        return self.head(x)


class Counting(Updating):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.seen += x.detach().mean(0)
            x = x + block(x)
        return self.head(x)


def normalized() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(*blocks)


def tied() -> nn.Module:
    model = Residual()
    model.blocks[5][1].weight = model.blocks[4][1].weight
    return model


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "skips": Skips,
    "all-states": AllStates,
    "scaled": Scaled,
    "updating": Updating,
    "counting": Counting,
    "batch-norm": normalized,
    "tied": tied,
    "few": lambda: Residual(5),
}


def captured(model: nn.Module, x: Tensor) -> Captured:
    return capturing.capture(model, Call((x,), {}))


def input_of(model: nn.Module) -> Tensor:
    return (
        torch.randn(2, 4, WIDTH)
        if isinstance(model, nn.TransformerEncoder)
        else torch.randn(4, WIDTH)
    )


def layouts(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [layouts(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    size_bytes = value.untyped_storage().nbytes()
    about = (value.dtype, value.device, value.storage_offset(), size_bytes, value.requires_grad)
    return (type(value), tuple(value.shape), value.stride(), *about)


def described(module: GraphModule) -> list[Any]:
    """All of a graph by position; memory by the first operator that has it."""
    place: dict[Node, int] = {}
    storages: dict[int, int] = {}
    paths, found = module_paths(module), []
    for number, node in enumerate(module.graph.nodes):
        place[node] = number
        values = tensors_of(node)
        memory = [storages.setdefault(storage_of(value), number) for value in values]
        given = map_arg((node.args, node.kwargs), lambda one: f"node {place[one]}")
        about = (paths.get(node), sorted(node.meta), layouts(node.meta.get("val")), memory)
        found.append((node.op, str(node.target), node.name, str(given), *about))
    return found


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What became of the attempts to write blocks out."""
    done: list[bool] = []

    def watched(module: GraphModule, found: equal_blocks.EqualBlocks) -> bool:
        done.append(block_copies.with_all_blocks(module, found))
        return done[-1]

    monkeypatch.setattr(capturing, "with_all_blocks", watched)
    return done


def check_as_whole(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = input_of(model).to(next(model.parameters()).dtype)
    made = described(captured(model, x).module)
    monkeypatch.setattr(capturing, "equal_blocks", lambda traced: None)
    assert made == described(captured(model, x).module)


@pytest.mark.parametrize("name", FOLDED)
def test_equal_blocks_are_traced_once(
    name: str, folds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_as_whole(FOLDED[name](), monkeypatch)
    assert folds == [True]


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_that_differ_or_share_are_traced_whole(
    name: str, folds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_as_whole(WHOLE[name](), monkeypatch)
    assert True not in folds


def test_a_joint_graph_that_is_not_periodic_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[GraphModule, equal_blocks.EqualBlocks]] = []

    def kept(module: GraphModule, found: equal_blocks.EqualBlocks) -> bool:
        given.append((module, found))
        return False

    monkeypatch.setattr(capturing, "with_all_blocks", kept)
    captured(Residual(), torch.randn(4, WIDTH))
    ((module, found),) = given
    gelus = [n for n in module.graph.nodes if n.target is torch.ops.aten.gelu_backward.default]
    assert len(gelus) == equal_blocks.KEPT
    gelus[3].kwargs = {"approximate": "tanh"}
    before = described(module)
    assert not block_copies.with_all_blocks(module, found)
    assert described(module) == before
    gelus[3].kwargs = gelus[2].kwargs
    assert block_copies.with_all_blocks(module, found)


@pytest.mark.parametrize("strategy", ["store-all", "olla"])
def test_a_deep_model_trains_as_in_eager(strategy: str) -> None:
    torch.manual_seed(3)
    model, x = Residual(), torch.randn(64, WIDTH, requires_grad=True)
    budget = None if strategy == "store-all" else "min"
    plan = memopt.plan(model, x, budget=budget, strategy=strategy, progress=False, cache=False)
    planned, found = plan.apply(model), []
    for one in (model, planned):
        model.zero_grad(set_to_none=True)
        x.grad = None
        torch.manual_seed(5)
        one(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_deep_model_whose_shapes_depend_on_values_is_refused_as_a_shallow_one() -> None:
    class Selecting(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x)
            return out + out[out > 0][0]

    with pytest.raises(CaptureError, match="a shape depends on the values"):
        captured(Selecting(), torch.randn(4, WIDTH))


def test_the_longest_period() -> None:
    def any_two(first: int, second: int) -> bool:
        return True

    assert longest_period("xyabcabcabcabz", any_two, 3) == Period(2, 3, 3)
    assert longest_period("xyabcabcabcabz", any_two, 4) is None
    # The period that leaves more out: "ab", and not the "c" that is there longer.
    assert longest_period("abababab" + "c" * 6, any_two, 3) == Period(0, 2, 4)
    # Equal keys are not enough.
    assert longest_period("abcabcabc", lambda first, _: first != 4, 3) is None
