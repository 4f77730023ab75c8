"""Compares a device's own record, `torch.cuda.memory._snapshot()`, with the allocator's simulation.

Recorded from a process's first allocation on (`torch.cuda.memory._record_memory_history()` before
the model is made), its trace holds every request and every segment. `CachingAllocator` gets the
same requests, and the bytes that both hold reserved are compared after each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memopt.programs.allocator_settings import AllocatorSettings
from memopt.programs.caching_allocator import CachingAllocator

_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class SnapshotComparison:
    """The bytes that a device and the simulation reserve for a trace's requests.

    Attributes:
        requests: allocations compared.
        device_peak_bytes: the most that the device had reserved.
        simulated_peak_bytes: the most that the simulation had.
        differs_at: the first allocation, counted from 0, after which they differ; None: nowhere.
        device_bytes, simulated_bytes: bytes that each had reserved then, or at the end.
    """

    requests: int
    device_peak_bytes: int
    simulated_peak_bytes: int
    differs_at: int | None
    device_bytes: int
    simulated_bytes: int

    @property
    def is_same(self) -> bool:
        """Whether the simulation reproduces the trace."""
        return self.differs_at is None


def settings_of(named: Mapping[str, object]) -> AllocatorSettings:
    """Read the settings in `torch.cuda.memory._snapshot()["allocator_settings"]`."""
    found = {one.name: named[one.name] for one in fields(AllocatorSettings) if one.name in named}
    divisions = found.get("roundup_power2_divisions", 0)
    if isinstance(divisions, Mapping):  # "1", "2", "4"... MiB → divisions
        found["roundup_power2_divisions"] = tuple(divisions.values())
    largest = named.get("max_split_size")
    if isinstance(largest, int) and 0 < largest < 2**62:
        found["max_split_bytes"] = largest
    return AllocatorSettings(**found)  # type: ignore[arg-type]  # as torch wrote them


def compare_snapshot(
    snapshot: Mapping[str, Any], device: int = 0, settings: AllocatorSettings | None = None
) -> SnapshotComparison:
    """Give a snapshot's requests to the simulation and compare the reserved bytes after each.

    Args:
        snapshot: the result of `torch.cuda.memory._snapshot()`, unpickled.
        device: index of one of its devices.
        settings: of the allocator; None: those that the snapshot names.

    Raises:
        ValueError: it has no trace of the device, or one that begins too late: it frees a block
            that it did not allocate, or reserves nothing for an allocation.
    """
    traces = snapshot.get("device_traces", ())
    if device >= len(traces) or not traces[device]:
        raise ValueError(
            f"the snapshot has no trace of device {device}: call "
            "torch.cuda.memory._record_memory_history() before the model is made"
        )
    if settings is None:
        settings = settings_of(snapshot.get("allocator_settings", {}))
    allocator = CachingAllocator(settings)
    reserved = peak = requests = 0
    differs: tuple[int, int, int] | None = None
    for event in traces[device]:
        action = event["action"]
        if action in _GROWS:
            reserved += _GROWS[action] * event["size"]
            peak = max(peak, reserved)
        elif action == "alloc":
            if not reserved:
                raise ValueError("the snapshot's trace begins late: its segments are older than it")
            allocator.allocate(event["addr"], event["size"], event["stream"])
            if differs is None and reserved != allocator.reserved_bytes:
                differs = requests, reserved, allocator.reserved_bytes
            requests += 1
        elif action == "free_completed":
            if not allocator.holds(event["addr"]):
                raise ValueError("the snapshot's trace begins late: it frees what is older than it")
            allocator.release(event["addr"])
    at, device_bytes, simulated = differs or (None, reserved, allocator.reserved_bytes)
    return SnapshotComparison(
        requests, peak, allocator.reserved_peak_bytes, at, device_bytes, simulated
    )
