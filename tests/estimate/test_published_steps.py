"""Published steps: what is built for a row, and how two depths stand for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import published
from benchmarks import published_steps as steps
from benchmarks.published import Measurements, estimate, measurements, meshes
from benchmarks.published.decoder import Decoder, Style
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.graph import Operator
from memopt.models.presets import find_device

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
    "held": (GATED, Style(packed=True, held=True, lora=("query", "key", "value"), rank=4)),
    "half": (SHAPE, Style(eager=False, loss="chunks", tensor=2)),
    "parallel": ({**SHAPE, "parallel_residual": True}, Style()),
    "norms of heads": ({**GATED, "qk_norm": True}, Style(scores=True, wide_softmax=True)),
    "rows of one rank": (GATED, Style(spread=True, tensor=2, loss="parallel", alone=True)),
    "stage": (GATED, Style(loss="none")),
    "one norm": ({**SHAPE, "parallel_residual": True, "shared_norm": True}, Style()),
}


@pytest.mark.parametrize("name", STYLES)
def test_decoders_train(name: str) -> None:
    shape, style = STYLES[name]
    model = Decoder(shape, style, 2, 16, first=True)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    found = model(ids, ids)
    (found[0] if style.held else found).backward()
    for path, parameter in model.named_parameters():
        trained = not style.rank or ".narrow." in path or ".widen." in path
        assert (parameter.grad is not None) == trained, path


def use(monkeypatch: pytest.MonkeyPatch, *rows: Mapping[str, Any]) -> None:
    source = {"title": "t", "url": "https://x", "date": "2026-01-01", "licence": "MIT"}
    names = ("megatron", "torchtitan", "y")
    found = Measurements(dict.fromkeys(names, source), {"m": SHAPE}, rows)
    for module in (published, estimate, meshes, steps):
        monkeypatch.setattr(module, "measurements", lambda: found)
    for kept in (published._by_name, estimate._captured):
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


TITAN: dict[str, Any] = {
    **ROW, "source": "torchtitan", "dtype": "float8", "sharding": "parameters", "micro_batches": 1,
    "parameters": "float32", "recompute": "full", "sequence_parallel": True,
}  # fmt: skip


def test_first_stages() -> None:
    row = TITAN | {"model": "llama-3-8b", "pp": 8, "tp": 1, "dp": 8, "micro_batches": 8}
    looped = row | {"virtual_stages": 2}
    many = looped | {"micro_batches": 32}
    assert [meshes.in_flight(one, 0) for one in (row, looped, many)] == [8, 16, 23]
    # Of two virtual stages one's gradients are whole, but for one layer more.
    whole, half, both = (meshes.stage_parts(one, 1e9, 0) for one in (row, looped, many))
    assert whole["gradients"] - 4e9 == pytest.approx(2 * (half["gradients"] - 4e9))
    assert both["gradients"] == whole["gradients"]
    table = 8 * whole["parameters"] / 4 - 4e9
    assert whole["gathered"] == 2 * table + 4e9
    # Of ranks that have all their context gathers are wide, of float8's weights, too.
    for wide in (row | {"dtype": "bfloat16"}, row | {"dp": 1, "cp": 8}):
        assert meshes.stage_parts(wide, 1e9, 0)["gathered"] == 2 * table + 8e9
    # FSDP's streams: two gathers of layers, the tables', and a rank's gradients.
    assert whole["streams"] == 2 * table + 2e9 + whole["parameters"]


def test_stages_between_have_what_is_left_over() -> None:
    row = TITAN | {"model": "llama-3-405b", "pp": 8, "dp": 8, "micro_batches": 8, "sequence": 8192}
    looped = row | {"virtual_stages": 2}
    assert [meshes.stage_layers(row, rank) for rank in (0, 1, 6, 7)] == [15, 16, 16, 15]
    assert [meshes.stage_layers(looped, rank) for rank in (0, 1, 7)] == [15, 16, 15]
    assert [meshes.layers_held(row, rank) for rank in (0, 1)] == [15 * 8, 16 * 7]
    first, second = (meshes.stage_parts(row, 1e9, rank) for rank in (0, 1))
    # Seven inputs of eight are a layer's in flight.
    assert second["sent"] == pytest.approx(first["sent"] * 17 / 16)


def test_tensor_parallelism_hides_behind_products() -> None:
    row = TITAN | {"model": "llama-3-8b", "tp": 8}
    hidden = row | {"overlapped_tensor_parallel": True}
    alone = meshes.tensor_parallel_s(row, 32, 1.0)
    assert meshes.tensor_parallel_s(hidden, 32, 1.0) == pytest.approx(alone / 8)
    assert meshes.tensor_parallel_s(hidden, 32, 0.0) == pytest.approx(alone)
    assert meshes.tensor_parallel_s(row | {"dtype": "bfloat16"}, 32, 0.0) > alone
    assert meshes.tensor_parallel_s(row | {"tp": 1}, 32, 0.0) == 0
    rows = hidden | {"scaling": "rowwise"}
    scattered = meshes.tensor_parallel_s(rows, 32, 0.0) - meshes.tensor_parallel_s(rows, 32, 1.0)
    assert 0 < scattered < alone * 7 / 8  # Its gathers are not hidden.


def test_operators_of_a_mesh() -> None:
    row = TITAN | {"model": "llama-3-8b", "tp": 2, "cp": 4, "sequence": 65536, "batch": 1}
    device = find_device("H100")

    def seconds(target: str, time_s: float, sent: Collective | None = None) -> float:
        one = Operator("a", (0,), (1,), time_s, target=target, collective=sent)
        return meshes._meshed(one, None, row, device).time_s

    # Queries of one rank meet the keys of four, whose gather hides behind enough of its own.
    assert seconds("attention", 1.0) == 4
    gathered = seconds("attention", 0.0)
    assert seconds("attention", gathered / 2) == pytest.approx(2.5 * gathered)
    # A part's slopes go on in float32, beside the next part; the last ones alone.
    assert seconds("attention backward", 1.0) == pytest.approx(4 + 2 / 3 * gathered)
    assert seconds("attention backward", 0.0) == pytest.approx(gathered * (1 + 4 * 2 / 3))
    sent = Collective(CollectiveKind.ALL_GATHER, 8, 2**30)
    half = replace(sent, size_bytes=2**29, stride=2)
    assert seconds("gather", 0.0, sent) == device.collective_time_s(half)


def test_larger_groups_hold_more() -> None:
    row = {"virtual_stages": 3, "micro_batches": 10, "chunk_group": 5}
    assert estimate._in_flight(row, 4) == 11


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


def test_streams_hold_gathered_weights_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {**ROW, "sharding": "parameters"})
    # 4 layers of 10 on each of 2 ranks, tables of 6: gathered in bfloat16, gradients in float32.
    gathered, tables, gradients = 2 * 2 * (6 + 2 * 10), 2 * 6, 4 * (6 + 4 * 10)
    row = {**ROW, "sharding": "parameters"}
    assert meshes.streams_bytes(row, 10, 36, 3) == gathered + tables + gradients
    use(monkeypatch)


def test_the_exposure_is_fitted_and_the_page_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ROW, {**ROW, "name": "b", "source": "y"})
    monkeypatch.setattr(steps, "FITTED", 4.0)
    times = dict.fromkeys(estimate.TIMES, 0.0) | {"exposed": 0.1}
    parts = {"parameters": 2.0**30}
    rows = [estimate.Row(n, (2**30, 2**30), (1.0, 0.9), parts, times) for n in ("a", "b")]
    # Three micro-batches are exposed for 0.1 s each: without that a step takes 0.6 s.
    assert steps._exposed(rows[0], 0.0).step[1] == pytest.approx(0.6)
    assert steps._median(rows, 2 * steps.FITTED) == pytest.approx(0.2)
    blocks = steps._blocks(rows, None)
    line = "| held out | 1 | 0.0% | 1 | 0% | 1 | 10.0% | 1 | 10% | 40.0% | 0 | 40% |"
    assert line in blocks["summary"]
    assert "an exposure of 5.5." in blocks["summary"]
    assert blocks["rows"].count("\n") == 3
    use(monkeypatch)


def test_rows_beyond_the_limits_have_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict.fromkeys(estimate.TIMES, 0.0)
    near = estimate.Row("megatron-10", (100, 109), (1.0, 1.19), {}, times)
    assert steps._outside([near]) == []
    known = estimate.Row("megatron-10", (100, 89), (0, 0), {}, times)
    other = estimate.Row("megatron-1", (0, 0), (1.0, 1.21), {}, times)
    lines = steps._outside([known, other])
    assert lines[0] == ["megatron-10", "-11%", "", steps.CAUSES["megatron-10 megatron-13"]]
    assert lines[1] == ["megatron-1", "", "+21%", "not found"]
    named = " ".join(steps.CAUSES).split()
    assert set(named) <= {row["name"] for row in measurements().rows}


def test_a_loss_apart_is_charged_beside_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**ROW, "source": "y", "kernels": "compiled", "gpus": 1}
    one = {k: v for k, v in row.items() if k not in ("dp", "tp", "sharding")}
    use(monkeypatch, one)
    found = estimate._depth(one, 1)
    logits = 2 * 64 * 256
    # Float32 copies of the logits, of their shares and of the gradient, which nothing fuses.
    assert found["activations"] > 3 * 4 * logits
    assert estimate._captured.cache_info().misses == 1
    use(monkeypatch)
