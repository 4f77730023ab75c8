"""Figures that no solver could add up or multiply are refused where a cost model is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import memopt
from memopt.models.budget import parse_budget
from memopt.models.chain import Chain, Stage
from memopt.models.checks import MOST_BYTES
from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.network import Network, Protocol
from memopt.solvers.running import Deadline


def graph(size_bytes: Any = 4, time_s: Any = 1.0, **more: Any) -> Graph:
    """Two forward operators and their backwards."""
    tensors = [Tensor("x", 1, TensorKind.INPUT)]
    tensors += [Tensor(name, size_bytes) for name in ("a", "b", "gb", "ga")]
    operators = [
        Operator("f1", (0,), (1,), time_s),
        Operator("f2", (1,), (2,), time_s),
        Operator("b1", (1, 3), (4,), time_s, phase=Phase.BACKWARD),
    ]
    return Graph(tensors, operators, outputs=(2,), gradients=(4,), tangents=(3,), **more)


def chain(size_bytes: Any = 4, time_s: Any = 1.0, **more: Any) -> Chain:
    """Three equal stages."""
    stage = Stage(time_s, time_s, size_bytes, size_bytes, size_bytes)
    return Chain(1, [stage] * 3, **more)


@pytest.mark.parametrize("make", [graph, chain])
@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"size_bytes": 2**52}, "sizes add up to .* are they in bytes"),
        ({"size_bytes": 2**63 - 1}, "sizes add up to"),
        ({"time_s": 1e200}, "times add up to .* are they in seconds"),
        ({"time_s": 1e308}, "times add up to"),
        ({"time_s": True}, "must be a finite number of seconds, at least 0, got True"),
        ({"time_s": math.nan}, "must be a finite number of seconds"),
        ({"size_bytes": True}, "must be a whole number of bytes"),
    ],
)
def test_cost_models_refuse(
    make: Callable[..., Any], figures: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**figures)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(to_host_bytes_per_s=1e-300), "to_host_bytes_per_s must be at least 1e-09"),
        (lambda: Device(from_host_bytes_per_s=5e-324), "must be at least 1e-09 per second"),
        (lambda: Device(to_host_bytes_per_s=True), "must be positive, got True"),
        (lambda: Device(transfer_latency_s=1e300), "transfer_latency_s must be at least 0, got"),
        (lambda: Device(transfer_latency_s=True), "must be at least 0, got True"),
        (lambda: Network(network_bytes_per_s=1e-300), "network_bytes_per_s must be at least"),
        (lambda: Protocol(start_s=True), "start_s must be at least 0"),
        (lambda: Implementation("i", True), "finite number of seconds"),
        (lambda: graph(extra_resident_bytes=2**53), "sizes add up"),
        (lambda: graph(boundary_bytes=2**60), "sizes add up"),
        (lambda: chain(resident_bytes=2**53), "sizes add up"),
    ],
)
def test_devices_and_the_rest_refuse(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_figures_are_pythons_own() -> None:
    """NumPy's wrap around: the sum of two of these is negative."""
    size = np.int32(2**30)
    one = graph(size, np.float32(0.5))
    assert sum(tensor.size_bytes for tensor in one.tensors) == 4 * 2**30 + 1
    assert {type(x.size_bytes) for x in one.tensors} == {int}
    assert {type(x.time_s) for x in one.operators} == {float}
    other = chain(size, Fraction(1, 2))
    assert other == chain(2**30, 0.5)
    assert memopt.plan(other, progress=False).peak_bytes > 2**31
    overhead = Stage(1, 1, 1, 1, 1, backward_overhead_bytes=np.int8(-3))  # type: ignore[arg-type]
    assert type(overhead.backward_overhead_bytes) is int


@pytest.mark.parametrize("limit", [math.nan, math.inf, -1, -math.inf, True, "3"])
def test_time_limits_are_refused_before_the_work(limit: Any) -> None:
    for ask in (memopt.plan, memopt.compare, memopt.curve):
        with pytest.raises(ValueError, match="time_limit_s must be a finite number of seconds"):
            ask(chain(), time_limit_s=limit, progress=False)


def test_a_time_limit_beyond_all_clocks_is_no_limit() -> None:
    """A solver's timedelta could not hold it."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)
    asked: Any = {"budget": "min", "strategy": "joint", "progress": False, "cache": False}
    found = memopt.plan(model, x, time_limit_s=1e40, **asked)
    assert found.peak_bytes == memopt.plan(model, x, **asked).peak_bytes


def test_a_solver_refuses_a_deadline_that_is_no_time() -> None:
    with pytest.raises(ValueError, match="time_limit_s must be a number of seconds"):
        Deadline(math.nan)


def test_budgets_are_exact_and_not_endless() -> None:
    assert parse_budget("9007199254740991 B", 1) == 2**53 - 1
    assert parse_budget("0.1GiB", 1) == 2**30 // 10
    assert parse_budget(MOST_BYTES, 1) == MOST_BYTES
    for budget in (2**63, 10**30, "9" * 400 + "GiB"):
        with pytest.raises(ValueError, match="pass None for no limit"):
            parse_budget(budget, 1)
