"""A tiny Llama at 64 times its usual length, within the peak of twice that length."""

from __future__ import annotations

from tests.kernels.tiled.test_tiled import Language, compare, fused, ids_of, planned


def test_64_times_the_usual_length_fits_into_the_peak_of_twice_that() -> None:
    usual, layers = 64, 22
    model = Language(True, layers=layers, width=32, words=200)
    short, long = ids_of(1, 2 * usual), ids_of(1, 64 * usual)
    budget = planned(model, short, kernels="aten").peak_bytes
    plan = planned(model, long, strategy="offload-graph", budget=budget)
    assert len(fused(plan)) >= 4 * layers
    assert plan.check(model).measured_peak_bytes <= budget
    found = compare(model, plan, long)
    assert found.pop("embedding.weight") == 0.0
    assert max(found.values()) < 2e-6
