"""Parameters that the forward itself updates: once, before the optimizer's update, as in eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from tests.executor.harness import Case, check


class Rows(nn.Module):
    """Rows of an embedding with a largest norm, its weight also read by the last layer."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 8, max_norm=0.5)
        self.bags = nn.EmbeddingBag(6, 8, max_norm=0.7, mode="sum")
        self.mix = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))
        self.rows.weight.requires_grad_(not frozen)

    def forward(self, index: Tensor) -> Tensor:
        found = self.rows(index) + self.bags(index.view(-1, 1))
        mixed: Tensor = self.mix(found).tanh()
        with torch.no_grad():
            self.total += mixed.sum(0)
        return mixed @ self.rows.weight.t()


class Frozen(Rows):
    def __init__(self) -> None:
        super().__init__(frozen=True)


class Unused(Rows):
    """The rows that the forward scales do not reach the loss: their weight has no gradient."""

    def forward(self, index: Tensor) -> Tensor:
        self.rows(index)
        return self.mix(self.bags(index.view(-1, 1))) @ self.mix.weight[:6].t()


def _index() -> Tensor:
    return torch.tensor([0, 5, 2, 2, 3, 1, 0, 4])


@pytest.mark.parametrize("model", [Rows, Frozen, Unused])
def test_drop_in(model: type[Rows]) -> None:
    check(Case(model, _index, steps=3))


def _steps(step: Any, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(7)
    record = []
    for _ in range(4):
        index, target = torch.randint(0, 6, (8,)), torch.randint(0, 6, (8,))
        record += [step(index, target), *(v.detach().clone() for v in model.state_dict().values())]
    return record


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(index: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(index), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("model", [Rows, Frozen, Unused])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "store-all"},
        {"strategy": "olla"},
        {"strategy": "rotor", "budget": "min"},
        {"strategy": "rotor", "budget": "min", "place": True},
        {"strategy": "store-all", "offload_optimizer": True},
    ],
)
def test_whole_steps(model: type[Rows], options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    planned = model()
    plain = copy.deepcopy(planned)
    trained = [p for p in planned.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    target = torch.randint(0, 6, (8,))
    plan = memopt.plan(
        planned, _index(), loss_fn=functional.cross_entropy, targets=target, optimizer=optimizer,
        whole_step=True, progress=False, time_limit_s=5, **options,
    )  # fmt: skip
    plan.save(tmp_path / "plan.json")
    step = memopt.load(tmp_path / "plan.json").train_step(
        planned, functional.cross_entropy, optimizer
    )
    found = _steps(lambda index, target: step(index, targets=target), planned)
    again = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    expected = _steps(_eager(plain, again), plain)
    for position, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), position


def test_an_update_is_in_the_captured_graph_once() -> None:
    """It is added twice, the second time with its costs."""
    model = nn.Linear(4, 3)
    plan = memopt.plan(
        model,
        torch.randn(2, 4),
        loss_fn=lambda y: y.square().sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        whole_step=True,
        progress=False,
    )
    assert plan.profiled is not None
    nodes = plan.profiled.captured.module.graph.nodes
    updates = [node.args for node in nodes if node.name.partition("_")[0] == "update"]
    assert len(updates) == len(set(updates)) == 2
