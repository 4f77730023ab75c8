"""Presets: found by name, sane, and torch-free."""

from __future__ import annotations

import pytest

from memopt.models.presets import ALIASES, PRESETS, find_device
from memopt.programs.serialize import dumps, loads


@pytest.mark.parametrize("device", PRESETS, ids=lambda d: d.name)
def test_every_preset_has_figures_and_a_source(device) -> None:
    assert find_device(device.name.upper()) is device
    assert device.source
    assert device.flops_per_s["float32"] > 1e9
    assert device.launch_latency_s > 0
    if device.block_bytes == 512:
        assert device.capacity_bytes is not None
        assert device.capacity_bytes > 15 * 2**30
        assert device.memory_bytes_per_s > 10 * device.to_host_bytes_per_s
    assert loads(dumps(device)) == device


def test_short_names() -> None:
    assert find_device(" h100 ").name == "H100-SXM-80GB"
    assert all(device in PRESETS for device in ALIASES.values())
    assert find_device("V100").to_host_bytes_per_s == 12.2e9


def test_fast_and_slow_hosts() -> None:
    grace, fast, slow = (find_device(name) for name in ("GH200", "H100", "H100-PCIe4"))
    assert find_device("H100-PCIe5") is fast
    rates = [device.to_host_bytes_per_s for device in (slow, fast, grace)]
    assert rates == sorted(rates)
    assert all(device.to_host_bytes_per_s < device.swap_in_bytes_per_s for device in (slow, grace))
    # Of one GPU of the two that share the link.
    assert find_device("GB200").to_host_bytes_per_s < grace.to_host_bytes_per_s


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX4090", "RTX4090-24GB"),
        ("rtx 4090", "RTX4090-24GB"),
        ("A100-40", "A100-SXM-40GB"),
        ("l40s", "L40S-48GB"),
        ("M2-Ultra", "M2-Ultra-192GB"),
    ],
)
def test_names_as_people_write_them(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_an_unknown_device_is_told_the_near_ones_or_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'RTX4080'; did you mean RTX4090"):
        find_device("RTX4080")
    with pytest.raises(ValueError, match=r"unknown device 'toaster'; memopt knows H100, H200"):
        find_device("toaster")
