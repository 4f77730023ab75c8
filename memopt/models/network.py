"""The network of a cluster, and the time of a collective on it.

The alpha-beta model of Thakur, Rabenseifner and Gropp (Optimization of Collective Communication
Operations in MPICH, IJHPCA 19(1), 2005, section 4), for p ranks, a whole of S bytes, a hop's
latency α and a rate β per rank; NCCL pipelines its trees and broadcasts:

    ring all-gather, ring reduce-scatter    (p-1) α + (p-1)/p S/β
    pairwise all-to-all                     (p-1) α + (p-1)/p S/β
    ring all-reduce (both rings)            2 (p-1) α + 2 (p-1)/p S/β
    tree all-reduce, pipelined              2 ⌈log₂ p⌉ α + 2 S/β
    ring broadcast, pipelined               (p-1) α + S/β
    tree broadcast, pipelined               ⌈log₂ p⌉ α + S/β

The fastest is taken, under the fastest protocol, as NCCL's tuner does. One of a ring's hops per
node leaves the node. If p ranks are on n nodes, m on each, all ranks of a node take turns to leave
it, each over a network adapter of its own: β is the slower of a rank's rate within the node and m
times its rate between nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt.models.checks import MOST_SECONDS, check_rate
from memopt.models.codec import Rate
from memopt.models.collective import Collective, CollectiveKind


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of a library's protocols for messages, which trade latency for rate.

    Attributes:
        start_s: per collective, seconds.
        node_latency_s: per hop within a node, seconds.
        network_latency_s: per hop between nodes, seconds.
        share: of the rates that it reaches.
    """

    start_s: float = 0.0
    node_latency_s: float = 0.0
    network_latency_s: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("start_s", "node_latency_s", "network_latency_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= MOST_SECONDS:
                raise ValueError(f"Protocol: {name} must be at least 0, got {value!r}")
        if not 0 < self.share <= 1:
            raise ValueError(f"Protocol: share must be in (0, 1], got {self.share!r}")


@dataclass(frozen=True, slots=True)
class Network:
    """The connections between the ranks of a cluster: links within a node, a network between nodes.

    Attributes:
        network_bytes_per_s: of one rank, each way, to other nodes.
        node_bytes_per_s: of one rank, each way, to the ranks of its node.
        ranks_per_node: how many ranks a node has.
        protocols: the library's protocols; the fastest is taken.
        source: where the figures come from.
    """

    network_bytes_per_s: Rate = math.inf
    node_bytes_per_s: Rate = math.inf
    ranks_per_node: int = 8
    protocols: tuple[Protocol, ...] = (Protocol(),)
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("network_bytes_per_s", "node_bytes_per_s"):
            check_rate("Network", name, getattr(self, name))
        if self.ranks_per_node < 1 or not self.protocols:
            raise ValueError("Network: ranks_per_node must be at least 1, with a protocol or more")

    def time_s(self, collective: Collective) -> float:
        """Return the seconds that a collective takes on an idle network; 0 for one rank alone."""
        if collective.ranks == 1:
            return 0.0
        return min(self._under(protocol, collective) for protocol in self.protocols)

    def _under(self, protocol: Protocol, collective: Collective) -> float:
        ranks, size = collective.ranks, collective.size_bytes
        on_a_node = min(ranks, max(1, self.ranks_per_node // collective.stride))
        nodes = -(-ranks // on_a_node)
        rate = self.node_bytes_per_s if on_a_node > 1 else math.inf
        if nodes > 1:
            rate = min(rate, on_a_node * self.network_bytes_per_s)
        rate *= protocol.share
        within, between = protocol.node_latency_s, protocol.network_latency_s
        round_s = (ranks - nodes) * within + (nodes - 1) * between
        depth_s = _levels(on_a_node) * within + _levels(nodes) * between
        part_s = (ranks - 1) / ranks * size / rate
        match collective.kind:
            case CollectiveKind.ALL_REDUCE:
                moved_s = min(2 * (round_s + part_s), 2 * (depth_s + size / rate))
            case CollectiveKind.BROADCAST:
                moved_s = min(round_s, depth_s) + size / rate
            case CollectiveKind.ALL_TO_ALL:
                moved_s = round_s + self._exchanged(size, on_a_node, nodes) / protocol.share
            case _:
                moved_s = round_s + part_s
        return protocol.start_s + moved_s

    def _exchanged(self, size_bytes: int, on_a_node: int, nodes: int) -> float:
        """Return the seconds in which each rank sends an equal part of its tensor to every other.
        Parts for other nodes leave through the rank's own adapter."""
        part_bytes = size_bytes / (on_a_node * nodes)
        inside = (on_a_node - 1) * part_bytes / self.node_bytes_per_s
        outside = (nodes - 1) * on_a_node * part_bytes / self.network_bytes_per_s
        return max(inside, outside)


def _levels(ranks: int) -> int:
    """Return the levels of a binary tree of that many ranks, without its root's."""
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0
