"""Published measurements: the file is what its loader promises, and a wrong row is named."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published import MEASURED, Measurements, measurements, tokens


def test_the_file_is_valid() -> None:
    found = measurements()
    assert len(found.rows) >= 120
    assert len({row["source"] for row in found.rows}) >= 8
    assert {row["source"] for row in found.rows} == set(found.sources)
    assert set(found.models) == {row["model"] for row in found.rows if "model" in row}


def test_tokens_are_one_ranks() -> None:
    row = {"sequence": 8, "batch": 2, "micro_batches": 3, "tp": 2, "cp": 2, "dp": 5}
    assert tokens(row) == 12


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peak_allocated_bytes": 57}, "peak_allocated_bytes is 57"),
        ({"peak_allocated_bytes": 53.2e9}, "peak_allocated_bytes is 53"),
        ({"step_s": 5856}, "step_s is 5856"),
        ({"resident_bytes": 10**11}, "resident_bytes is more than"),
        ({"peak_reserved_bytes": 2**30}, "peak_reserved_bytes is less than"),
        ({"tokens_per_s": 100_000}, "its step is"),
        ({"tp": 3}, "make 6 ranks, not 8"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"sequence": 8192.0}, "sequence is 8192.0"),
        ({"cuda_graphs": 1}, "cuda_graphs is 1"),
        ({"memory": 3}, "no field 'memory'"),
        ({"source": "hearsay"}, "source 'hearsay' is not listed"),
        ({"model": "unknown"}, "model 'unknown' is not listed"),
        ({"name": "other"}, "it is there twice"),
        (dict.fromkeys(MEASURED), "it measures nothing"),
    ],
)
def test_a_wrong_row_is_named(changes: dict[str, Any], named: str) -> None:
    found = measurements()
    right = next(row for row in found.rows if row.get("tp") == 4 and "step_s" in row)
    good = {**right, "name": "one", "gpus": 8, "dp": 2, "pp": 1, "cp": 1}
    other = {**right, "name": "other"}
    Measurements(found.sources, found.models, (good, other))
    changed = {key: value for key, value in {**good, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=named):
        Measurements(found.sources, found.models, (changed, other))


def test_sources_and_models_are_whole() -> None:
    found = measurements()
    with pytest.raises(ValueError, match="source 'x' needs"):
        Measurements({"x": {"title": "x", "url": "https://x"}}, {}, ())
    with pytest.raises(ValueError, match="model 'x' needs whole"):
        Measurements(found.sources, {"x": {"layers": 2.5}}, ())
