"""The meter of random training loops reports what exceeds a budget, and nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import memopt
from memopt.executor.surroundings import Surroundings
from memopt.models.charges import NO_CHARGES
from tests.fuzz.loop_budgets import Metered, fuzz_budgets, metered
from tests.fuzz.loop_models import WIDTH, Mlp
from tests.fuzz.loops import Subject

MLP = Subject("mlp", Mlp, lambda rows: (torch.randn(rows, WIDTH),), nullcontext)
ACTIONS = ["plain", "hook_added", "held_output", "kept_graph"]


def steps(wrap: Any = memopt.wrap) -> list[Metered]:
    return list(metered(7, MLP, "min", ACTIONS, partial(wrap, strategy="rotor")))


@pytest.mark.slow
def test_steps_are_metered_to_a_few_bytes() -> None:
    """With "min" there is not a byte to spare: what is free are the bytes of numbers."""
    found = steps()
    assert [one.action for one in found] == ["0 plain", "2 held_output", "3 kept_graph"]
    assert -64 <= found[0].over_bytes <= 0
    assert max(one.over_bytes for one in found) <= 0


@pytest.mark.slow
def test_what_is_not_charged_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surroundings, "charges", lambda *_: NO_CHARGES)
    found = steps()
    assert min(one.over_bytes for one in found) > 0
    assert not any(one.told for one in found)
    assert found[0].text == f"0 plain: {found[0].over_bytes} bytes above {found[0].budget_bytes}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3062, 3070, 3073, 3105, 6300])
def test_a_training_loop_keeps_its_budget(seed: int) -> None:
    row = fuzz_budgets(seed)
    assert not row.wrong, row.wrong
    assert row.ran
