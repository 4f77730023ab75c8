"""Alternatives of estimated steps: where parameters have no values, and what they need."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from memopt.capture.fake import Fakes
from memopt.kernels import with_implementations
from memopt.models.device import Device
from memopt.models.presets import find_device
from memopt.pricing.measure import MeasureOptions
from memopt.profiler import profile_model
from memopt.profiler.estimate import estimate_model


def test_fake_parameters_are_left_to_the_kernels_own_check() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    device = find_device("H100")
    profiled = estimate_model(model, torch.empty(4, 8), device)
    stand_in = Fakes().model(model)
    # Whether the copy that was captured is still there is the garbage collector's to say.
    captured = replace(profiled.captured, model=lambda: stand_in)
    found = with_implementations(replace(profiled, captured=captured), device=device)
    names = {c.name for o in found.graph.operators for c in o.implementations if not c.exact}
    assert "output" in names


def test_workspaces_of_convolutions_on_the_cpu_are_those_that_are_measured() -> None:
    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    x, options = torch.randn(16, 16, 28, 28), MeasureOptions(max_rounds=1)
    device = Device("host", flops_per_s={"float32": 1e11}, memory_bytes_per_s=1e10)
    measured = with_implementations(profile_model(model, x, options=options), options=options)
    known = {
        (operator.name, one.name): one.workspace_bytes
        for operator in measured.graph.operators
        for one in operator.implementations
    }
    estimated = with_implementations(estimate_model(model, x, device), device=device)
    compared = {}
    for operator in estimated.graph.operators:
        for one in operator.implementations if "convolution" in operator.target else ():
            compared[operator.name, one.name] = one.workspace_bytes / known[operator.name, one.name]
    # ATen's own kernels, whose columns nothing prices, are no alternative of an estimate.
    assert "native" in {name for _, name in known.keys() - compared.keys()}
    assert {"split 8", "weight gradient split"} <= {name for _, name in compared}
    assert min(compared.values()) > 0.97
    assert max(compared.values()) < 1.25
