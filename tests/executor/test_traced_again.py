"""A planned call that finds another state of Python objects is traced again, inside of the step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import memopt
from memopt.pricing.memory import metered

QUICK: dict[str, Any] = {"strategy": "rotor", "progress": False, "cache": False}
FOUND: list[Tensor] = []


class Appending(nn.Module):
    """Appends to a list that grows from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        self.steps += 1  # which has a trace run the forward, without data
        hidden = self.linear(x).tanh()
        FOUND.append(hidden.sum())
        return hidden


def model_and_inputs() -> tuple[nn.Module, tuple[Tensor, ...]]:
    FOUND.clear()
    return Appending(), (torch.randn(4, 3), torch.ones(20_000))


def test_inputs_are_not_copied() -> None:
    model, inputs = model_and_inputs()
    memopt.wrap(model, budget="min", **QUICK)

    def needed_bytes() -> int:
        model.zero_grad()
        gc.collect()
        with metered(torch.device("cpu")) as used:
            model(*inputs).sum().backward()
        return used.peak_bytes

    model(*inputs).sum().backward()
    # Beside the step, Dynamo copies the generator's state.
    assert max(needed_bytes() for _ in range(2)) < 10_000
    assert len(FOUND) == memopt.running(model).calls.planned == 3


def test_a_checkpoint_around_sees_no_trace_and_what_its_stop_leaves_out_is_warned_of() -> None:
    model, inputs = model_and_inputs()
    module = memopt.plan(model, inputs, budget="min", **QUICK).apply(model)
    FOUND.clear()
    loss = checkpoint(module, *inputs, use_reentrant=False).sum()
    with pytest.warns(UserWarning, match=r"anything in .*FOUND.*early_stop\(False\)"):
        loss.backward()
    assert (module.calls.planned, len(FOUND)) == (2, 1)
    with set_checkpoint_early_stop(False):
        loss = checkpoint(module, *inputs, use_reentrant=False).sum()
    loss.backward()
    assert (module.calls.planned, len(FOUND)) == (4, 3)
