"""Steps of a model in parts that make plans, where none could be metered."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import memopt
from tests.users.part_models import Ragged, Reversible

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def test_a_part_that_a_backward_calls_is_planned_and_the_budget_kept_or_said() -> None:
    """It is found in the second step, which is metered: nothing is planned in its backward. Each
    step was, a profile of the user's was blamed, and nothing said that the budget was not kept."""
    model, plain = Reversible(), Reversible()
    memopt.wrap(model, 2**12, "rotor", parts="auto", progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            for one in (model, plain):
                one.zero_grad()
                one(X).square().mean().backward()
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]
    texts = [str(one.message) for one in said]
    assert not [text for text in texts if "profiler" in text]
    assert [text for text in texts if "exceed their budget of 4096 bytes" in text]
    report = memopt.running(model).report()  # type: ignore[union-attr]
    assert "planned: block.inner: rotor" in report


def test_it_is_said_that_no_step_could_be_metered() -> None:
    """Inputs of ever other shapes: each step made plans, and exceeded the budget without a word."""
    model = memopt.wrap(Ragged(), 2**12, "rotor", parts="auto", progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in range(1, 6):
            model(X, torch.tensor(rows)).square().mean().backward()
    assert sum("none of the last 4 steps" in str(one.message) for one in said) == 1
