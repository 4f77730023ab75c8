"""Published steps: what is built for a row, and how two depths stand for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from benchmarks import published_steps as steps
from benchmarks.published import Measurements, estimate, measurements
from benchmarks.published.decoder import Decoder, Style

SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocabulary": 256}
GATED = {**SHAPE, "gated": True, "norm": "rms", "positions": "rope"}
ROW: dict[str, Any] = {
    "name": "a", "source": "megatron", "model": "m", "gpu": "H100", "gpus": 4, "dp": 2, "tp": 2,
    "sequence": 64, "batch": 2, "micro_batches": 3, "parameters": "bfloat16", "dtype": "bfloat16",
    "gradients": "float32", "optimizer": "adam", "state_bytes": 12, "sharding": "optimizer",
    "peak_allocated_bytes": 2**30, "step_s": 1.0,
}  # fmt: skip
STYLES = {
    "eager": (GATED, Style()),
    "scores": ({**SHAPE, "tied": True, "bias": True}, Style(scores=True, loss="in place")),
    "adapters": (GATED, Style(packed=True, loss="own", lora=("query", "mlp"), rank=4)),
    "half": (SHAPE, Style(eager=False, loss="chunks", tensor=2)),
    "parallel": ({**SHAPE, "parallel_residual": True}, Style()),
    "one norm": ({**SHAPE, "parallel_residual": True, "shared_norm": True}, Style()),
}


@pytest.mark.parametrize("name", STYLES)
def test_decoders_train(name: str) -> None:
    shape, style = STYLES[name]
    model = Decoder(shape, style, 2, 16, first=True)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    model(ids, ids).backward()
    for path, parameter in model.named_parameters():
        trained = not style.rank or ".narrow." in path or ".widen." in path
        assert (parameter.grad is not None) == trained, path


def use(monkeypatch: pytest.MonkeyPatch, *rows: Mapping[str, Any]) -> None:
    source = {"title": "t", "url": "https://x", "date": "2026-01-01", "licence": "MIT"}
    found = Measurements({"megatron": source, "y": source}, {"m": SHAPE}, rows)
    for module in (estimate, steps):
        monkeypatch.setattr(module, "measurements", lambda: found)
    for kept in (estimate._by_name, estimate._captured):
        kept.cache_clear()
    estimate._NAMES.clear()


def test_two_depths_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {k: v for k, v in ROW.items() if k != "dp"} | {"name": "b", "gpus": 2}
    use(monkeypatch, ROW, alone)
    (row,) = estimate.estimated(None, "a")
    low, deep = estimate._depth(ROW, 1), estimate._depth(ROW, 4)
    assert row.parts["activations"] == pytest.approx(deep["activations"], rel=1e-6)
    assert row.parts["parameters"] == deep["parameters"] > low["parameters"]
    # Gradients stay, in float32; half of the optimizer's state is another rank's.
    assert row.parts["gradients"] == 4 * deep["trained"]
    assert row.parts["state"] == 12 * deep["trained"] / 2
    (other,) = estimate.estimated(None, "b")
    assert other.parts["state"] == 2 * row.parts["state"]
    assert row.step[1] > 3 * deep["time"]
    use(monkeypatch)


@pytest.mark.parametrize(
    ("stages", "parts", "batches", "held"),
    [(1, 1, 1, 1), (4, 1, 8, 1), (4, 3, 16, 9), (4, 3, 2, 6)],
)
def test_parts_in_flight(stages: int, parts: int, batches: int, held: int) -> None:
    row = {"virtual_stages": parts, "micro_batches": batches}
    assert estimate._in_flight(row, stages) == held


def test_what_is_not_estimated_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    assert estimate.why_not(ROW) == ""
    for changes, why in (
        ({"quantized": "nf4"}, "4 bits"),
        ({"gpu": "abacus"}, "the GPU's rates"),
        ({"model": "other"}, "not published"),
        ({"optimizer": "muon"}, "optimizer's state"),
        ({"peak_allocated_bytes": 0, "cp": 2}, "nothing measured"),
    ):
        changed = {k: v for k, v in {**ROW, **changes}.items() if v}
        assert why in estimate.why_not(changed)


def test_every_case_is_a_row_with_a_reason_to_be_there() -> None:
    names = {row["name"] for row in measurements().rows}
    assert set(steps._cases()) <= names
    assert len(steps._cases()) > 120


def test_constants_are_fitted_and_the_page_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ROW, {**ROW, "name": "b", "source": "y"})
    times = dict.fromkeys(estimate.TIMES, 0.0) | {"launches": 100.0}
    parts = {"parameters": 2.0**30}
    rows = [estimate.Row(n, (2**30, 2**30), (1.0, 0.8), parts, times) for n in ("a", "b")]
    assert steps._fitted(rows)[0] == pytest.approx(1.25)
    host = [estimate.Row("a", (0, 1), (0.03, 1e-6), parts, times)]
    assert steps._fitted(host)[1] == pytest.approx(1e-4)
    blocks = steps._blocks(rows, None)
    assert (
        "| held out | 1 | 0.0% | 1 | 0% | 1 | 20.0% | 0 | 20% | 0.0% | 1 | 0% |"
        in blocks["summary"]
    )
    assert "1.25 times" in blocks["summary"]
    assert blocks["rows"].count("\n") == 3
    use(monkeypatch)
