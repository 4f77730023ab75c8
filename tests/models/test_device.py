"""Devices refuse what cannot be, and price transfers."""

import math

import pytest

from memopt.models.device import Device


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"to_host_bytes_per_s": 0}, "'d': to_host_bytes_per_s must be positive, got 0"),
        ({"from_host_bytes_per_s": -1.0}, "from_host_bytes_per_s must be positive"),
        ({"memory_bytes_per_s": math.nan}, "memory_bytes_per_s must be positive"),
        ({"flops_per_s": {"float32": 0.0}}, "flops_per_s.'float32'. must be positive"),
        ({"transfer_latency_s": -1}, "transfer_latency_s must be at least 0"),
        ({"launch_latency_s": math.inf}, "launch_latency_s must be at least 0"),
        ({"flops_fraction": 0}, r"flops_fraction must be in \(0, 1\]"),
        ({"memory_fraction": 1.5}, r"memory_fraction must be in \(0, 1\]"),
        ({"product_exposure": -1.0}, "product_exposure must be at least 0, got -1.0"),
        ({"block_bytes": 0}, "block_bytes must be at least 1"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Device("d", **fields)


def test_transfers():
    device = Device(to_host_bytes_per_s=100, from_host_bytes_per_s=50, transfer_latency_s=0.5)
    assert device.swap_out_time_s(100) == 1.5
    assert device.swap_in_time_s(100) == 2.5
    assert Device(to_host_bytes_per_s=100).swap_in_time_s(100) == 1
    assert Device().swap_out_time_s(10**12) == 0


def test_allocated_bytes_round_up_to_blocks():
    cuda = Device(block_bytes=512)
    assert [cuda.allocated_bytes(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert Device().allocated_bytes(513) == 513
