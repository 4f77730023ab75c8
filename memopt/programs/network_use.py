"""The share of a step's communication that its computation hides."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.programs.replay import Timeline


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """The network during a step.

    Attributes:
        time_s: how long collectives run, seconds.
        exposed_s: the part of that during which the compute stream computes nothing.
    """

    time_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """The share of the time during which the compute stream computes."""
        return 1 - self.exposed_s / self.time_s if self.time_s else 1.0


def network_use(timeline: Timeline) -> NetworkUse:
    """Return the use of the network in a replayed step."""
    # A collective computes nothing: a span with its instruction is a wait for its end.
    sends = {sent.instruction for sent in timeline.collectives}
    spans = enumerate(zip(timeline.start_s, timeline.end_s, strict=True))
    busy = [(s, e) for position, (s, e) in spans if e > s and position not in sends]
    hidden_s, place = 0.0, 0
    for sent in timeline.collectives:
        # Both lists are in the order of time, and neither overlaps itself.
        while place < len(busy) and busy[place][1] <= sent.start_s:
            place += 1
        index = place
        while index < len(busy) and busy[index][0] < sent.end_s:
            hidden_s += min(busy[index][1], sent.end_s) - max(busy[index][0], sent.start_s)
            index += 1
    time_s = sum(sent.end_s - sent.start_s for sent in timeline.collectives)
    return NetworkUse(time_s, max(0.0, time_s - hidden_s))
