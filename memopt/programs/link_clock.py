"""The clock of a step: the compute stream, the link to the host in both directions, the network.

A transfer starts when the compute stream gets to its instruction and its direction of the link is
free. Where memory is given back, and before something is read that comes back, the compute stream
waits. A collective starts when the compute stream gets to it and the network is free; before its
result is read, and before the memory of what it reads or writes is given back, the compute stream
waits for it. Replay keeps this time, and so do those who write a program and ask how late it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memopt.models.device import Device


@dataclass
class LinkClock:
    """Times of the compute stream, of the link and of the network, seconds.

    What moves is named by an integer: a stage of a chain, or a tensor of a graph.

    Attributes:
        device: link rates.
        now_s: when the compute stream gets there.
        wait_s: how long it has waited for transfers, until somebody sets it back.
        out_free_s: when the link to the host is free.
        in_free_s: when the link from the host is free.
        stored_s: when each copy to the host is complete.
        arrival_s: when each copy back is complete, and each result of a collective, until the
            compute stream has passed it.
        network_free_s: when the network is free.
        sent_s: when each tensor that a collective reads is sent.
        host_free_s: when the host's processor is free.
        updated_s: when the updates on the host that read or change an item are over.
    """

    device: Device
    now_s: float = 0.0
    wait_s: float = 0.0
    out_free_s: float = 0.0
    in_free_s: float = 0.0
    stored_s: dict[int, float] = field(default_factory=dict)
    arrival_s: dict[int, float] = field(default_factory=dict)
    network_free_s: float = 0.0
    sent_s: dict[int, float] = field(default_factory=dict)
    host_free_s: float = 0.0
    updated_s: dict[int, float] = field(default_factory=dict)

    def send(
        self, reads: Iterable[int], writes: Iterable[int], duration_s: float
    ) -> tuple[float, float]:
        """Queue a collective, once what it reads is there; its start and its end."""
        for item in reads:
            self.arrive(item)
        start_s = max(self.now_s, self.network_free_s)
        self.network_free_s = end_s = start_s + duration_s
        self.sent_s.update(dict.fromkeys(reads, end_s))
        self.arrival_s.update(dict.fromkeys(writes, end_s))
        return start_s, end_s

    def copy_out(self, item: int, size_bytes: int) -> tuple[float, float]:
        """Queue a copy to the host of data that exist; its start and its end."""
        start_s = max(self.now_s, self.out_free_s)
        self.out_free_s = end_s = start_s + self.device.swap_out_time_s(size_bytes)
        if not self.device.duplex:
            self.in_free_s = end_s
        self.stored_s[item] = end_s
        return start_s, end_s

    def copy_back(self, item: int, size_bytes: int) -> tuple[float, float]:
        """Queue a copy from the host, whose device copy has been freed; its start and its end."""
        start_s = max(self.now_s, self.in_free_s, self.updated_s.get(item, self.now_s))
        self.in_free_s = end_s = start_s + self.device.swap_in_time_s(size_bytes)
        if not self.device.duplex:
            self.out_free_s = end_s
        self.arrival_s[item] = end_s
        return start_s, end_s

    def on_host(self, items: Iterable[int], duration_s: float) -> tuple[float, float]:
        """Queue an update on the host, once the host copies that it reads are complete; its start
        and its end."""
        stored_s = [self.stored_s.get(item, self.now_s) for item in items]
        start_s = max(self.now_s, self.host_free_s, *stored_s)
        self.host_free_s = end_s = start_s + duration_s
        self.updated_s.update(dict.fromkeys(items, end_s))
        return start_s, end_s

    def drop(self, item: int) -> None:
        """Wait for the transfers and the updates of an item whose host copy is dropped."""
        now_s = self.now_s
        arrival_s, updated_s = self.arrival_s.pop(item, now_s), self.updated_s.pop(item, now_s)
        self.wait(arrival_s, updated_s, self.stored_s.pop(item))

    def wait(self, *until_s: float) -> None:
        """Let the compute stream wait for the last of these."""
        end_s = max(self.now_s, *until_s)
        self.wait_s += end_s - self.now_s
        self.now_s = end_s

    def free(self, item: int) -> None:
        """Wait for the copies and the collectives of an item whose device copy is freed."""
        now_s = self.now_s
        arrival_s, sent_s = self.arrival_s.pop(item, now_s), self.sent_s.pop(item, now_s)
        self.wait(arrival_s, sent_s, self.stored_s.get(item, now_s))

    def arrive(self, item: int) -> None:
        """Wait for an item that is about to be read, if it is on its way back."""
        if item in self.arrival_s:
            self.wait(self.arrival_s.pop(item))

    def compute(self, reads: Iterable[int], duration_s: float) -> None:
        """Wait for what an operation reads, then run it."""
        for item in reads:
            self.arrive(item)
        self.now_s += duration_s
