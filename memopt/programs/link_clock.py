"""The clock of a step: the compute stream, the link to the host in both directions, the network.

A transfer starts when the compute stream gets to its instruction and its direction of the link is
free. The compute stream waits for it before memory is released and before a swapped-in tensor is
read. A collective starts when the compute stream gets to it and the network is free. The compute
stream waits for it before its result is read, and before the memory of its operands or results is
released. Replay uses this clock, and so does code that writes a program and needs its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memopt.models.device import Device


@dataclass
class LinkClock:
    """Times of the compute stream, of the link and of the network, seconds.

    Items that move are named by an integer: a stage of a chain, or a tensor of a graph.

    Attributes:
        device: link rates.
        now_s: present time of the compute stream.
        wait_s: how long it has waited for transfers, until the caller resets it.
        out_free_s: when the link to the host is free.
        in_free_s: when the link from the host is free.
        stored_s: when each copy to the host is complete.
        arrival_s: when each copy back is complete, and each result of a collective, until the
            compute stream has waited for it.
        network_free_s: when the network is free.
        sent_s: when each operand of a collective is sent.
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
        """Queue a collective, once its operands are ready; return its start and its end."""
        for item in reads:
            self.arrive(item)
        start_s = max(self.now_s, self.network_free_s)
        self.network_free_s = end_s = start_s + duration_s
        self.sent_s.update(dict.fromkeys(reads, end_s))
        self.arrival_s.update(dict.fromkeys(writes, end_s))
        return start_s, end_s

    def copy_out(self, item: int, size_bytes: int) -> tuple[float, float]:
        """Queue a copy of existing data to the host; return its start and its end."""
        start_s = max(self.now_s, self.out_free_s)
        self.out_free_s = end_s = start_s + self.device.swap_out_time_s(size_bytes)
        if not self.device.duplex:
            self.in_free_s = end_s
        self.stored_s[item] = end_s
        return start_s, end_s

    def copy_back(self, item: int, size_bytes: int) -> tuple[float, float]:
        """Queue a copy from the host of an item with no device copy; return start and end."""
        start_s = max(self.now_s, self.in_free_s, self.updated_s.get(item, self.now_s))
        self.in_free_s = end_s = start_s + self.device.swap_in_time_s(size_bytes)
        if not self.device.duplex:
            self.out_free_s = end_s
        self.arrival_s[item] = end_s
        return start_s, end_s

    def on_host(self, items: Iterable[int], duration_s: float) -> tuple[float, float]:
        """Queue an update on the host, once the host copies that it reads are complete; return its
        start and its end."""
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
        """Let the compute stream wait for the last of these times."""
        end_s = max(self.now_s, *until_s)
        self.wait_s += end_s - self.now_s
        self.now_s = end_s

    def free(self, item: int) -> None:
        """Wait for the copies and the collectives of an item whose device copy is freed."""
        if item in self.arrival_s or item in self.sent_s or item in self.stored_s:
            now_s = self.now_s
            arrival_s, sent_s = self.arrival_s.pop(item, now_s), self.sent_s.pop(item, now_s)
            self.wait(arrival_s, sent_s, self.stored_s.get(item, now_s))

    def arrive(self, item: int) -> None:
        """Wait for an item that is about to be read, if its transfer is under way."""
        if item in self.arrival_s:
            self.wait(self.arrival_s.pop(item))

    def compute(self, reads: Iterable[int], duration_s: float) -> None:
        """Wait for the operands of an operation, then run it."""
        for item in reads:
            self.arrive(item)
        self.now_s += duration_s
