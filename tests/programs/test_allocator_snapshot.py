"""A snapshot of a device's allocator beside the simulation: read, compared, refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.gpu.allocator_snapshot import compare_snapshot
from memopt.programs.allocator_settings import AllocatorSettings

MIB = 2**20


def event(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, "frames": []}


def snapshot() -> dict[str, Any]:
    """What PyTorch would record, worked out by hand: no device has made it."""
    large, small = 0x7F0000000000, 0x7F1000000000
    return {
        "segments": [],
        "allocator_settings": {"expandable_segments": False, "max_split_size": 2**63 - 1},
        "device_traces": [
            [
                event("segment_alloc", large, 20 * MIB),
                event("alloc", large, 5 * MIB),
                event("alloc", large + 5 * MIB, 9 * MIB - 7),
                event("segment_alloc", small, 2 * MIB),
                event("alloc", small, 100),
                event("free_requested", large, 5 * MIB),
                event("free_completed", large, 5 * MIB),
                event("alloc", large, 4 * MIB),
                event("segment_alloc", large + 64 * MIB, 30 * MIB),
                event("alloc", large + 64 * MIB, 29 * MIB),
                event("snapshot", 0, 0),
            ]
        ],
    }


def test_a_snapshot_by_the_rules_is_reproduced() -> None:
    found = compare_snapshot(snapshot())
    assert found.is_same
    assert found.requests == 5
    assert found.device_peak_bytes == found.simulated_peak_bytes == 52 * MIB


def test_the_first_difference_is_named() -> None:
    other = copy.deepcopy(snapshot())
    other["device_traces"][0][8]["size"] = 32 * MIB
    found = compare_snapshot(other)
    assert not found.is_same
    assert (found.differs_at, found.device_bytes, found.simulated_bytes) == (4, 54 * MIB, 52 * MIB)
    assert not compare_snapshot(
        snapshot(), settings=AllocatorSettings(expandable_segments=True)
    ).is_same


def test_traces_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="no trace of device 1"):
        compare_snapshot(snapshot(), device=1)
    late = snapshot()
    del late["device_traces"][0][0]
    with pytest.raises(ValueError, match="older than it"):
        compare_snapshot(late)
    early = snapshot()
    del early["device_traces"][0][1]
    with pytest.raises(ValueError, match="frees what is older"):
        compare_snapshot(early)
