"""Layers that are dropped at random, in a model that runs in parts: a named budget holds also in
steps that run more of them than those which were measured."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.pricing.memory import metered

X = torch.randn(64, 16, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Dropping(nn.Module):
    """A stack of blocks, `run` of which run, as a random number says in models of people's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.run: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        random.random()  # which no graph holds
        x = self.stem(x)
        for number in self.run:
            x = self.blocks[number](x)
        return x


def stepped(model: Dropping, run: tuple[int, ...], meter: bool = False) -> tuple[float, int]:
    """Return a step's loss, and its peak above what is there before."""
    model.run = run
    model.zero_grad()
    if not meter:
        loss = model(X).square().mean()
        loss.backward()
        return loss.item(), 0
    with metered(torch.device("cpu")) as use:
        loss = model(X).square().mean()
        loss.backward()
    return loss.item(), use.peak_bytes


def pair() -> tuple[Dropping, Dropping]:
    torch.manual_seed(0)
    model, plain = Dropping(), Dropping()
    plain.load_state_dict(model.state_dict())
    return model, plain


def there(model: nn.Module) -> int:
    return X.nbytes + sum(one.nbytes for one in model.parameters())


def test_parts_keep_their_inputs_until_their_backward() -> None:
    """Each had its plan of the smallest peak, which kept a wide activation until then."""
    model, plain = pair()
    memopt.wrap(model, "min", "rotor", parts="auto", progress=False)
    every = tuple(range(6))
    for _ in range(4):
        assert stepped(model, every) == stepped(plain, every)
    loss, used = stepped(model, every, meter=True)
    expected, most = stepped(plain, every, meter=True)
    assert loss == expected
    assert used < most / 2
    assert there(model) + used <= memopt.running(model).parts.shared.peak_bytes()  # type: ignore[union-attr]


def test_a_step_of_more_parts_than_were_measured_is_within_the_budget() -> None:
    model, plain = pair()
    _, most = stepped(plain, tuple(range(6)), meter=True)
    budget = there(plain) + most * 6 // 10
    memopt.wrap(model, budget, "rotor", parts="auto", progress=False)
    for run in ((0, 1, 2), (3, 4, 5)) * 4:
        assert stepped(model, run) == stepped(plain, run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, used = stepped(model, tuple(range(6)), meter=True)
    assert loss == stepped(plain, tuple(range(6)))[0]
    assert there(model) + used <= budget
