"""CTC losses, whose labels' lengths are values, are planned, exact, and within the budget."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from tests.users.metering import StepMeter

FRAMES, MOST = 40, 35
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


class Speech(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))
        self.kind, self.ctc = kind, nn.CTCLoss(zero_infinity=True)

    def forward(self, x: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        spoken = self.body(x).log_softmax(-1).transpose(0, 1)
        if self.kind == "padded labels":
            loss: Tensor = self.ctc(spoken, labels, frames, lengths)
            return loss
        if self.kind == "numbers":
            return functional.ctc_loss(spoken, labels, (FRAMES,) * 4, (5,) * 4, blank=3)
        joined = labels.flatten()[:60]
        return functional.ctc_loss(spoken, joined, frames, lengths, reduction="sum", blank=3)


def batch(kind: str, step: int) -> Batch:
    torch.manual_seed(step)
    x, labels = torch.randn(4, FRAMES, 16), torch.randint(4, 12, (4, MOST))
    frames = torch.tensor([FRAMES, FRAMES - 1, FRAMES - 2, 30 + step])
    longest = (2, 20, 30, MOST)[step]
    lengths = [longest, longest - 1, 2, longest]
    if kind == "joined labels":
        lengths = ([15, 15, 15, 15], [20, 20, 10, 10], [5, 25, 25, 5], [30, 30, 0, 0])[step]
    return x, labels, frames, torch.tensor(lengths)


@pytest.mark.parametrize("kind", ["padded labels", "joined labels", "numbers"])
def test_lengths_differ_from_step_to_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Speech(kind)
    reference = copy.deepcopy(model)
    memopt.wrap(model, "min", "rotor", progress=False)
    meter, over = StepMeter(monkeypatch), []
    for step in range(4):
        losses = []
        for one in (model, reference):
            given = batch(kind, step)
            for p in one.parameters():
                p.grad = None
            if one is model:
                meter.begin()
            loss = one(*given)
            loss.backward()
            if one is model:
                over.append(meter.end(model.memopt.plans[0]))
            losses.append(loss.detach())
            del loss
        assert torch.equal(*losses)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
    assert max(over[1:]) <= 0
    assert (model.calls.planned, model.calls.original, len(model.memopt.plans)) == (4, 0, 1)
