"""Two thousand planned steps: train and eval, shapes, saving and loading; memory stays flat, and
every step is eager's."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.users.test_shapes import living

STEPS, WARM = 2000, 500
SHAPES = (16, 12, 8)
MOST_GROWTH_BYTES = 8 * 2**20
"""Of the process from step WARM to the end; a leak of one step's tensors is fifty times that."""


class Network(nn.Module):
    """A convolution with running statistics, dropout, a shared layer, an output nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x)
        z = self.shared(self.drop(self.shared(y.mean((2, 3))).tanh()))
        return self.head(z), y.softmax(1)


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean()


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Bitwise equal, through nested containers."""
    pairs = zip(
        torch.utils._pytree.tree_leaves(found),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    )
    for one, other in pairs:
        if isinstance(other, Tensor):
            assert torch.equal(one, other), where
        else:
            assert one == other, where


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, seed: int) -> list[Any]:
    """A step, and what it left: loss, gradients, random state."""
    torch.manual_seed(seed)
    loss = loss_of(module(x))
    loss.backward()
    found = [loss.detach(), torch.get_rng_state()]
    found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = Network()
    twin = copy.deepcopy(model)
    make = lambda one: torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    optimizer, other = make(model), make(twin)
    largest = torch.randn(SHAPES[0], 3, 8, 8)
    plan = memopt.plan(model, largest, loss_fn=loss_of, budget="min", progress=False)
    assert plan.budget is not None
    wrapped: Any = memopt.wrap(
        model, round(plan.budget * 1.2), loss_fn=loss_of, place=True, progress=False
    )
    loaded: Any = plan.apply(model)
    process, levels, sizes = psutil.Process(), [], []
    for step in range(STEPS):
        module = loaded if step % 7 == 0 else wrapped
        x = largest if module is loaded else largest[: SHAPES[step % 3]].clone()
        if step % 5 == 4:
            model.eval()
            twin.eval()
            with torch.no_grad():
                assert_same(wrapped(x), twin(x), f"evaluation after step {step}")
            model.train()
            twin.train()
        found = trained(module, optimizer, x, step)
        assert_same(found, trained(twin, other, x, step), f"step {step}")
        if step % 100 == 99:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, tmp_path / "state.pt")
            kept = torch.load(tmp_path / "state.pt")
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            plan.save(tmp_path / "plan.json")
            loaded = memopt.load(tmp_path / "plan.json").apply(model, largest)
            del state, kept, found, x
            assert_same(model.state_dict(), twin.state_dict(), f"after step {step}")
            levels.append(living())
            sizes.append(process.memory_info().rss)
    assert_same(optimizer.state_dict(), other.state_dict(), "optimizer")
    settled = levels[WARM // 100 :]
    assert all(one == two for one, two in itertools.pairwise(settled)), settled
    growth = max(sizes[WARM // 100 :]) - sizes[WARM // 100]
    assert growth <= MOST_GROWTH_BYTES, sizes
    print(f"{STEPS} steps; resident set grew by {growth / 2**20:.2f} MiB since step {WARM}")
