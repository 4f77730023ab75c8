"""Random modules under random plans; `make fuzz` runs thousands, resumable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import __main__ as runner
from tests.fuzz.compiled import fuzz_compiled
from tests.fuzz.loops import fuzz_loop
from tests.fuzz.modules import fuzz_module
from tests.fuzz.values import fuzz_values


@pytest.mark.slow
@given(seed=st.integers(10**6, 10**9))
def test_random_modules(seed: int) -> None:
    row = fuzz_module(seed)
    assert not row.wrong, row.wrong


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1003, 1127, 1130, 1141])
def test_a_module(seed: int) -> None:
    row = fuzz_module(seed)
    assert not row.wrong, row.wrong
    assert row.cases >= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [103, 127, 128, 249, 292, 558, 678])
def test_a_module_with_compiled_kernels(seed: int) -> None:
    row = fuzz_compiled(seed)
    assert not row.wrong, row.wrong
    assert row.ran, row.refused


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 8, 12, 2006, 2035])
def test_a_training_loop(seed: int) -> None:
    row = fuzz_loop(seed)
    assert not row.wrong, row.wrong
    assert row.ran, row.refused
    assert not row.refused, row.refused


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 255, 276])
def test_a_module_that_looks_at_values(seed: int) -> None:
    row = fuzz_values(seed)
    assert not row.wrong, row.wrong
    assert row.ran, row.refused


def test_runs_are_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def line(seed: int, _only: tuple[str, ...]) -> str:
        ran.append(seed)
        wrong = [("case", "differs")] if seed == 2 else []
        counts = {"store-all": 3}
        return json.dumps({"seed": seed, "cases": 3, "by_strategy": counts, "wrong": wrong})

    monkeypatch.setitem(runner.KINDS, "modules", line)
    out = tmp_path / "found.jsonl"
    runner.run("modules", range(3), out)
    runner.run("modules", range(5), out)
    assert ran == [0, 1, 2, 3, 4]
    text = runner.report(out)
    assert "'cases': 15" in text
    assert "2: case - differs" in text
