"""Alternatives that depend on parameters' values, where the model at hand has none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from memopt.capture.fake import Fakes
from memopt.kernels import with_implementations
from memopt.models.presets import find_device
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
