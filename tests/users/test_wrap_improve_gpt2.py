"""`memopt.wrap` on 200 steps of GPT-2: a better plan takes over, with the bits of eager."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.strategies import Auto
from tests.users.metering import StepMeter
from tests.users.test_wrap_improve import waited_for
from tests.zoo.language import TINY_VOCABULARY, logits_loss, make_gpt2

STEPS, BATCH, TOKENS, LIMIT_S = 200, 4, 32, 60.0
SWAP_AFTER = 20


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return make_gpt2(0.1)("tiny")


def trained(
    model: nn.Module, begin: Callable[[int], object], end: Callable[[int], object]
) -> list[torch.Tensor]:
    """The losses of all steps, on a batch of its own each; `begin` and `end` are called around the
    forward and backward of each."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for number in range(STEPS):
        ids = torch.randint(3, TINY_VOCABULARY, (BATCH, TOKENS))
        begin(number)
        loss = logits_loss(model(input_ids=ids))
        loss.backward()  # type: ignore[no-untyped-call]
        end(number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_steps_have_eagers_losses_while_a_better_plan_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, logger="memopt.api.improving")
    plain = trained(gpt2(), lambda _: None, lambda _: None)
    model = memopt.wrap(
        gpt2(),
        0.6,
        loss_fn=logits_loss,
        optimizer="adamw",
        time_limit_s=LIMIT_S,
        progress=False,
    )
    meter, over_bytes, ran = StepMeter(monkeypatch), list[int](), list[memopt.Plan]()

    def begin(number: int) -> None:
        if number == SWAP_AFTER:
            waited_for(model)
        meter.begin()

    def end(_number: int) -> None:
        (plan,) = memopt.running(model).plans  # type: ignore[union-attr]
        over_bytes.append(meter.end(plan))
        ran.append(plan)

    losses = trained(model, begin, end)
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    assert max(over_bytes) <= 0
    first, last = ran[0], ran[-1]
    assert first.strategy == Auto(at_once=True)
    assert last.strategy == Auto()
    assert last.step_time_s < first.step_time_s
    assert last.budget == first.budget
    assert len({plan.program for plan in ran}) == 2
    assert [x.message.count("takes over") for x in caplog.records] == [1]
