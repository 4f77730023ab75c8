"""Workspace of 3-d convolutions, estimated against measured, with and without AVX-512."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.models.presets import find_device
from memopt.profiler import MeasureOptions, ProfileCache, estimate_model, profile_model


@pytest.mark.parametrize(
    ("channels", "planes", "stride"),
    [(64, 2, 1), (64, 1, 1), (64, 3, 1), (64, 2, 2), (32, 4, 1), (64, 8, 2)],
)
def test_backward_with_padded_depth(channels: int, planes: int, stride: int) -> None:
    model = nn.Sequential(
        nn.Conv3d(64, 64, 1), nn.Conv3d(64, channels, 3, stride=stride, padding=1, bias=False)
    )
    images = torch.randn(2, 64, planes, 8, 8)
    estimated = estimate_model(model, images, find_device("cpu-core")).graph
    options = MeasureOptions(cap_s=0.1, max_rounds=1, cache=ProfileCache())
    measured = profile_model(model, images, options=options).graph
    pairs = [
        (one.workspace_bytes, other.workspace_bytes)
        for one, other in zip(estimated.operators, measured.operators, strict=True)
        if "convolution_backward" in one.name
    ]
    assert len(pairs) == 2
    for one, other in pairs:
        assert one == pytest.approx(other, rel=0.01, abs=1024)
