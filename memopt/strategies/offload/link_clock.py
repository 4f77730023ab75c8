"""The clock of a program that is being written, by the rules of `memopt.programs.replay`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memopt.models.device import Device


@dataclass
class LinkClock:
    """Times of the compute stream and of the link in both directions, seconds.

    What moves is named by an integer: a stage of a chain, or a tensor of a graph.

    Attributes:
        device: link rates.
        now_s: when the compute stream gets there.
        out_free_s: when the link to the host is free.
        in_free_s: when the link from the host is free.
        stored_s: when each copy to the host is complete.
        arrival_s: when each copy back is complete, until the compute stream has passed it.
    """

    device: Device
    now_s: float = 0.0
    out_free_s: float = 0.0
    in_free_s: float = 0.0
    stored_s: dict[int, float] = field(default_factory=dict)
    arrival_s: dict[int, float] = field(default_factory=dict)

    def copy_out(self, item: int, size_bytes: int) -> None:
        """Queue a copy to the host."""
        self.out_free_s = max(self.now_s, self.out_free_s) + self.device.swap_out_time_s(size_bytes)
        if not self.device.duplex:
            self.in_free_s = self.out_free_s
        self.stored_s[item] = self.out_free_s

    def copy_back(self, item: int, size_bytes: int) -> None:
        """Queue a copy from the host, whose device copy has been freed."""
        self.in_free_s = max(self.now_s, self.in_free_s) + self.device.swap_in_time_s(size_bytes)
        if not self.device.duplex:
            self.out_free_s = self.in_free_s
        self.arrival_s[item] = self.in_free_s

    def free(self, item: int) -> None:
        """Wait for the copies of an item whose device copy is freed."""
        self.now_s = max(self.now_s, self.stored_s[item], self.arrival_s.pop(item, 0.0))

    def compute(self, reads: Iterable[int], duration_s: float) -> None:
        """Wait for what an operation reads, then run it."""
        arrivals = [self.arrival_s.pop(item, 0.0) for item in reads]
        self.now_s = max([self.now_s, *arrivals]) + duration_s
