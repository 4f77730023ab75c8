"""State of an optimizer that grows while a wrapped model trains."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import memopt


def test_state_that_grows_is_charged_in_every_step() -> None:
    """LBFGS's does until its history is full, by lists. A budget that it outgrows is told of, also
    once a kind is planned again no more."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]
    model = memopt.wrap(nn.Sequential(*layers), "1.2MiB", "rotor", improve=False, progress=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.linspace(-1, 1, 32 * 512).view(512, 32)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.cos())
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(12):
            optimizer.step(closure)
            (state,) = optimizer.state.values()
            held = [one for one in pytree.tree_leaves(dict(state)) if isinstance(one, torch.Tensor)]
            charges = model.memopt.around.charges(None)
            assert charges.state_bytes == sum(one.nbytes for one in held)
    texts = [str(one.message) for one in told if "optimizer state" in str(one.message)]
    assert any("no plan leaves room" in text for text in texts)
    assert "It was planned again often enough and stays" in texts[-1]
