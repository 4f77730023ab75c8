"""fits(): rows agree with plans, and the largest batch is the largest."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import memopt
from memopt.models.presets import H100

DEVICE = dataclasses.replace(H100, name="small", capacity_bytes=72 * 2**20)


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def batch_of(size: int) -> torch.Tensor:
    return torch.empty(256 * size, 128, device="meta")


def test_rows_agree_with_plans() -> None:
    table = memopt.fits(model(), batch_of(4), device=DEVICE, optimizer="adamw", progress=False)
    assert [row.strategy for row in table.rows] == ["store-all", "sequential", "auto"]
    for row in table.rows:
        plan = memopt.plan(
            model(),
            batch_of(4),
            strategy=row.strategy,
            device=DEVICE,
            mode="estimate",
            optimizer="adamw",
            progress=False,
        )
        assert row.fits
        assert (row.peak_bytes, row.step_time_s) == (plan.peak_bytes, plan.step_time_s)
        assert row.smallest_budget_bytes is not None
        assert row.smallest_budget_bytes <= plan.peak_bytes
    best = table.best()
    assert best is not None
    assert best.strategy in ("store-all", "rotor")
    assert "exp_avg_sq" in dict(table.standing)


def test_the_largest_batch_is_proved_and_right() -> None:
    table = memopt.fits(
        model(), batch_of, device=DEVICE, strategies=["store-all", "rotor"], progress=False
    )
    largest = {row.strategy: row.largest_batch for row in table.rows}
    assert all(row.proved for row in table.rows)
    assert largest["rotor"] > largest["store-all"]
    for name, size in largest.items():
        for batch, fitting in ((size, True), (size + 1, False)):
            try:
                memopt.plan(
                    model(),
                    batch_of(batch),
                    strategy=name,
                    device=DEVICE,
                    mode="estimate",
                    progress=False,
                )
            except memopt.InfeasibleBudgetError:
                assert not fitting
            else:
                assert fitting
    assert "largest batch" in str(table)


def test_what_the_allocator_reserves_must_fit_too() -> None:
    named = {"device": H100, "mode": "estimate", "progress": False}
    plain = memopt.plan(model(), batch_of(8), strategy="store-all", **named)
    reserved = plain.reserved
    assert reserved is not None
    assert reserved.reserved_peak_bytes > plain.peak_bytes
    small = dataclasses.replace(H100, capacity_bytes=reserved.reserved_peak_bytes - 1)
    table = memopt.fits(
        model(), batch_of, batch=8, device=small, strategies=["store-all", "rotor"], progress=False
    )
    store_all, rotor = table.rows
    assert not store_all.fits
    assert "CUDA's allocator reserves" in store_all.note
    # The largest batches are those whose reserved bytes fit.
    assert store_all.largest_batch < 8
    assert rotor.fits
    assert rotor.reserved_bytes < reserved.reserved_peak_bytes
    assert "reserved" in str(table)
    with pytest.raises(memopt.InfeasibleBudgetError, match="or budget what is allocated"):
        memopt.plan(model(), batch_of(8), strategy="store-all", **{**named, "device": small})
    within = memopt.plan(model(), batch_of(8), strategy="rotor", **{**named, "device": small})
    assert within.reserved_bytes_limited
    # The remedy: bytes that are allocated.
    asked = {**named, "device": small, "budget": plain.peak_bytes}
    allocated = memopt.plan(model(), batch_of(8), strategy="store-all", **asked)
    assert allocated.peak_bytes == plain.peak_bytes


def test_nothing_fits() -> None:
    tiny = dataclasses.replace(DEVICE, capacity_bytes=2**20)
    table = memopt.fits(model(), batch_of, device=tiny, strategies=["rotor"], progress=False)
    assert table.best() is None
    assert table.rows[0].largest_batch is None
    assert not table.rows[0].fits
    assert "no " in str(table)


def test_the_search_can_be_cut_short() -> None:
    table = memopt.fits(
        model(), batch_of, device="H100", strategies=["rotor"], max_batches=2, progress=False
    )
    assert not table.rows[0].proved
    assert "≥ 2" in str(table)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="has no capacity_bytes: pass budget="):
        memopt.fits(model(), batch_of(1), device="cpu-core")
    with pytest.raises(ValueError, match="batch= goes with a function"):
        memopt.fits(model(), batch_of(1), device="H100", batch=3)
