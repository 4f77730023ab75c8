"""The scripts that the page on trainers shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import (
    budget_and_peak,
    train_hugging_face,
    train_lightning,
    train_loop,
    train_what_does_not_fit,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def test_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_loop.main(epochs=1) < 2.3
    assert "planned=15, original=1" in capsys.readouterr().out


def test_hugging_face() -> None:
    assert train_hugging_face.main(steps=4).calls.planned == 4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning() -> None:
    assert train_lightning.main(steps=3).calls.planned == 6


@pytest.mark.slow
def test_what_does_not_fit(tmp_path: Path) -> None:
    picture = tmp_path / "streams.png"
    plan = train_what_does_not_fit.main(steps=1, picture=picture)
    assert plan.budget is not None
    assert plan.peak_bytes <= plan.budget
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_a_smaller_budget_takes_less_and_is_kept(tmp_path: Path) -> None:
    rows = budget_and_peak.main(tmp_path / "budget.png", shares=(1.0, 0.7, 0.4))
    assert len(rows) == 3
    assert all(peak <= budget for budget, peak in rows)
    peaks = [peak for _, peak in rows]
    assert peaks == sorted(peaks, reverse=True)
