"""Torch's settings that choose kernels are part of what a cost, an answer or a baseline is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

import memopt
from memopt.kernels.compiled.fuse import _place
from memopt.kernels.compiled.subgraph import region_key
from memopt.pricing.measure import environment, priced_for
from memopt.step.numerics import numeric_settings, precisions
from memopt.step.signature import call_signature

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "TF32": lambda: torch.set_float32_matmul_precision("high"),
    "TF32 off in cuDNN": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "bfloat16": lambda: torch.set_float32_matmul_precision("medium"),
    "one by one": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cuDNN's deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "sums of halves": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
}


def restore() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    assert numeric_settings() == ""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    restore()


def test_each_setting_is_in_the_key() -> None:
    """Before, all had one key: costs measured in float32 were those of TF32, too."""
    keys = {priced_for(CPU)}
    assert keys == {environment(CPU)}
    for change in SETTINGS.values():
        change()
        keys.add(priced_for(CPU))
        restore()
    assert len(keys) == len(SETTINGS) + 1


def test_costs_of_other_settings_are_not_used(tmp_path: Any) -> None:
    from memopt.pricing.cache import ProfileCache
    from memopt.pricing.measure import MeasureOptions
    from memopt.profiler import profile_model

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    seen: list[str] = []

    class Noted(ProfileCache):
        def store(self, costs: Any) -> None:
            seen.extend(costs)
            super().store(costs)

    options = MeasureOptions(cap_s=0.1, max_rounds=1, cache=Noted(tmp_path))
    for change in (lambda: None, lambda: None, SETTINGS["deterministic"]):
        change()
        profile_model(model, x, options=options)
    assert len(seen) == len(set(seen))
    assert sum("deterministic" in key for key in seen) * 2 == len(seen)


def test_planning_leaves_precisions_set_one_by_one() -> None:
    """Before, planning asked for the one precision of all, which torch then refuses to give."""

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu()

    SETTINGS["one by one"]()
    before = precisions()
    with pytest.raises(RuntimeError, match="precision"):
        torch.get_float32_matmul_precision()
    memopt.plan(Sets(), torch.randn(3, 4), progress=False, cache=False)
    assert precisions() == before


def test_a_call_on_another_device_of_the_kind_is_the_same_call() -> None:
    full = torch.ops.aten.full.default

    def text(device: str) -> str:
        return call_signature(full, ([2], 0.5), {"device": torch.device(device)}).text

    def key(device: str) -> str:
        graph = Graph()
        made = graph.call_function(full, ([2], 0.5), {"device": torch.device(device)})
        graph.output((made,))
        return region_key(graph, [], [])

    for one in (text, key):
        assert one("cuda:0") == one("cuda:1") != one("cpu")


def test_compiled_code_is_for_one_device() -> None:
    """Before, a region compiled for cuda:0, whose code launches on its streams, ran on cuda:1."""
    from types import SimpleNamespace

    one: Any = SimpleNamespace(key="k")
    assert _place(one, torch.device("cuda:0")) != _place(one, torch.device("cuda:1"))
