"""Parts of a model that are replaced, removed or added while it trains: what is there is planned,
and the budget is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.users.part_models import Blocks, Routed, layers

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore:.*Its sub-modules are planned instead")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def wide() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*layers(96), nn.Linear(16, 16))


def other_head(model: Any) -> None:
    model.head = wide()


def other_expert(model: Any) -> None:
    model.blocks[0].one, model.blocks[0].other = wide(), wide()


def no_head(model: Any) -> None:
    model.head = nn.Identity()


def one_more(model: Any) -> None:
    model.blocks.append(wide())


def other_block(model: Any) -> None:
    torch.manual_seed(6)
    model.blocks[0] = Routed()


CHANGES: dict[str, tuple[Callable[[Any], None], int]] = {
    "other head": (other_head, 2),
    "other experts": (other_expert, 2),
    "no head": (no_head, 1),
    "one block more": (one_more, 3),
    "another block": (other_block, 2),
}
"""Name → a change of the model, and how many of its parts each step calls from then on."""


def trained(model: Any, change: Callable[[Any], None], steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(2 * steps):
        if step == steps:
            change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_there_is_planned(name: str) -> None:
    change, parts = CHANGES[name]
    model: Any = Blocks()
    memopt.wrap(model, "min", "rotor", parts="auto", progress=False)
    found = trained(model, change)
    planned = model.calls.planned
    assert all(map(torch.equal, found, trained(Blocks(), change)))
    assert model.calls.original == 0
    assert planned == 3 * 2 + 3 * parts
    for line in model.memopt.report().splitlines():
        if line.startswith("planned: "):
            assert model.get_submodule(line.split(": ")[1]).__dict__["memopt"].plans


def test_a_part_that_is_named_is_replaced() -> None:
    model: Any = Blocks()
    before = model.head
    memopt.wrap(model, "min", "rotor", parts=["head"], progress=False)
    found = trained(model, other_head)
    assert all(map(torch.equal, found, trained(Blocks(), other_head)))
    assert model.calls.planned == 6
    assert "memopt" not in before.__dict__  # it runs as without memopt
