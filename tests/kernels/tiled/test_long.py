"""Tiny Llamas at 64 times their usual length, within the peak of twice that length."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from tests.kernels.tiled.test_tiled import Language, compare, fused, ids_of, planned
from tests.users.metering import StepMeter
from tests.zoo import torchvision_shim  # noqa: F401  (before what transformers loads)

USUAL = 64


def test_64_times_the_usual_length_fits_into_the_peak_of_twice_that() -> None:
    layers = 22
    model = Language(True, layers=layers, width=32, words=200)
    short, long = ids_of(1, 2 * USUAL), ids_of(1, 64 * USUAL)
    budget = planned(model, short, kernels="aten").peak_bytes
    plan = planned(model, long, strategy="offload-graph", budget=budget)
    assert len(fused(plan)) >= 4 * layers
    assert plan.check(model).measured_peak_bytes <= budget
    found = compare(model, plan, long)
    assert found.pop("embedding.weight") == 0.0
    assert max(found.values()) < 2e-6


def _hugging_faces() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=172,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4000,
        max_position_embeddings=64 * USUAL,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def _labelled(length: int) -> dict[str, Tensor]:
    ids = ids_of(1, length)
    return {"input_ids": ids, "labels": ids}


def test_hugging_faces_llama_trains_at_64_times_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss is eager's; sums over chunks round the gradients."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    model, meter = _hugging_faces(), StepMeter(monkeypatch)
    plain, long = copy.deepcopy(model), _labelled(64 * USUAL)
    short = memopt.plan(model, _labelled(2 * USUAL), strategy="store-all", progress=False)
    memopt.wrap(model, short.peak_bytes, kernels="tiled", returns="loss", progress=False)
    losses = []
    for one in (model, plain):
        steps = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(3):
            meter.begin()
            loss = one(**long).loss
            loss.backward()
            over_bytes = meter.end(model.plans[-1])  # type: ignore[union-attr]
            assert (over_bytes <= 0) == (one is model), step
            steps.step()
            steps.zero_grad()
            losses.append(loss.detach())
    assert torch.equal(losses[0], losses[3])
    torch.testing.assert_close(losses[1:3], losses[4:], rtol=2e-6, atol=0)
    assert model.calls.planned == 3  # type: ignore[union-attr]
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()
