"""The table of popular architectures: what is refused works as the refusal advises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.users.trained_architectures as table


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def test_exact() -> None:
    assert [row.outcome for row in table.rows_of("OPT")] == ["exact"]


def test_own_loss_that_selects_by_a_condition() -> None:
    assert [row.outcome for row in table.rows_of("ELECTRA")] == ["exact"]


def test_layers_and_masks_drawn_in_python() -> None:
    refused, remedied = table.rows_of("Wav2Vec2")
    assert refused.outcome == "refused"
    for remedy in (
        "model.config.layerdrop = 0",
        "model.config.apply_spec_augment = False",
        "model.wav2vec2.feature_extractor._requires_grad = False",
    ):
        assert remedy in refused.sentence
    assert "labels" not in refused.sentence
    assert remedied.outcome == "exact"


def test_a_difference_is_named() -> None:
    one = {"the loss of call 0": torch.zeros(()), "buffer b in step 0": torch.zeros(2)}
    assert table.difference(one, dict(one)) == ""
    assert (
        table.difference(one, one | {"the loss of call 0": torch.ones(())}) == "the loss of call 0"
    )
    other = one | {"buffer b in step 0": torch.tensor([0.0, 1e-45])}
    assert table.difference(one, other) == "buffer b in step 0"
    other = one | {"buffer b in step 0": torch.zeros(2, dtype=torch.float64)}
    assert table.difference(one, other) == "buffer b in step 0"
    del other["buffer b in step 0"]
    assert table.difference(one, other) == "buffer b in step 0"


def test_names_are_one_each() -> None:
    names = [one.name for one in table.ARCHITECTURES]
    assert len(set(names)) == len(names) > 30
