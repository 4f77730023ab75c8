"""This machine's Device: complete, and good for an estimate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.pricing.device_measure import at_once, host_update_rate


def test_measured_device_estimates() -> None:
    device = memopt.measure_device("cpu")
    assert device.block_bytes == 1
    assert device.capacity_bytes is None
    assert device.host_update_bytes_per_s is None  # the host is the device
    assert (device.flops_fraction, device.memory_fraction) == (1.0, 1.0)
    assert {"float32", "bfloat16", "float32 convolution", "float32 softmax"} <= set(
        device.flops_per_s
    )
    assert all(rate > 0 for rate in device.flops_per_s.values())
    # Loose on purpose: any machine since 2000.
    assert 1e-8 < device.launch_latency_s < 1e-2
    assert 1e8 < device.memory_bytes_per_s < 1e13
    graph = memopt.profile(
        nn.Linear(64, 64), torch.empty(8, 64), device=device, mode="estimate", progress=False
    )
    assert graph.compute_time_s >= len(graph.operators) * device.launch_latency_s


def test_the_rate_of_updates_on_the_host() -> None:
    assert 1e7 < host_update_rate() < 1e13


def test_directions_that_are_used_together() -> None:
    assert at_once(10.0, 20.0, 0.15) == (10.0, 20.0, False)
    assert at_once(10.0, 20.0, 0.1) == (10.0, 20.0, True)
    out_rate, in_rate, overlap = at_once(10.0, 10.0, 0.125)
    assert overlap
    assert (out_rate, in_rate) == pytest.approx((8.0, 8.0))
