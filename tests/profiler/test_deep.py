"""Models of thousands of parameters and buffers."""

from __future__ import annotations

import sys

import pytest
import torch

import memopt
from tests.zoo import get


@pytest.mark.slow
def test_a_thousand_layers_are_captured() -> None:
    """ResNet-1001 failed with Python's RecursionError before the limit was raised around it."""
    limit = sys.getrecursionlimit()
    with torch.device("meta"):
        model = get("resnet1001").build("paper")
    images = (torch.zeros(8, 3, 224, 224),)
    graph = memopt.profile(model, images, device="V100-PCIe", mode="estimate", progress=False)
    assert len(graph.to_chain().stages) > 300
    assert sys.getrecursionlimit() == limit
