"""Planning draws nothing: a model that is planned in its first step drops what it would have."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt


def network() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16))


class Drawing(nn.Module):
    """Draws numbers itself, and reads them as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.attention(x, x, x, need_weights=False)[0]
        kept = attended * torch.bernoulli(attended.detach().sigmoid())
        return kept * 1.187, kept


def states() -> tuple[bytes, Any, bytes]:
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        pickle.dumps(np.random.get_state()),
    )


@pytest.mark.parametrize("strategy", ["auto", "joint", "monet"])
def test_plans_leave_it(strategy: str) -> None:
    model, x = network(), torch.randn(4, 8, 16)
    before = states()
    memopt.plan(model, x, strategy=strategy, cache=False, progress=False, time_limit_s=1)
    assert states() == before


@pytest.mark.parametrize(
    "how",
    [
        {"place": True},
        {"order": True},
        {"whole_step": True},
        {"whole_step": True, "offload_optimizer": True},
        {"whole_step": True, "movable": "all"},
        {"accumulate": True},
    ],
    ids=str,
)
def test_plans_of_other_kinds_leave_it(how: dict[str, Any]) -> None:
    model, x = network(), torch.randn(4, 8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    before = states()
    memopt.plan(
        model, x, loss_fn=torch.sum, optimizer=optimizer, strategy="auto", cache=False,
        progress=False, time_limit_s=1, **how,
    )  # fmt: skip
    assert states() == before


def test_trials_of_kernels_leave_it() -> None:
    """Whether a kernel may write where it is told to is tried; of these shapes nobody has asked."""
    model, x = Drawing(), torch.randn(3, 37, 4)
    before = states()
    how: dict[str, Any] = {"strategy": "auto", "budget": "min", "cache": False, "progress": False}
    memopt.plan(model, x, kernels="compiled", **how)
    assert states() == before


def test_the_first_step_of_a_module_that_plans_itself_draws_what_eager_draws() -> None:
    model, x = Drawing(), torch.randn(3, 41, 4)
    options: dict[str, Any] = {"strategy": "auto", "budget": "min", "kernels": "compiled"}
    after = []
    for run in (torch.compile(model, backend="memopt", options=options), model):
        torch.manual_seed(5)
        run(x)
        after.append(states())
    assert after[0] == after[1]


def test_measuring_the_machine_leaves_it() -> None:
    before = states()
    memopt.measure_device("cpu")
    assert states() == before
