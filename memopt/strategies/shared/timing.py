"""The link to the host, and how early transfers come: input of the mover's compiled loops."""

from __future__ import annotations

import math
from typing import NamedTuple

from memopt.models.device import Device


class Link(NamedTuple):
    """The link to the host: seconds for a copy, rates, whether both directions overlap."""

    latency_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    duplex: bool

    @classmethod
    def of(cls, device: Device) -> Link:
        """Read a device's link."""
        return cls(
            float(device.transfer_latency_s),
            float(device.to_host_bytes_per_s),
            float(device.swap_in_bytes_per_s),
            device.duplex,
        )


class Timing(NamedTuple):
    """The rule by which copies and fetches come early; the replay chooses among a few.

    Attributes:
        lead: a fetch is issued when the compute until its reader is at most so many times the time
            of all fetches up to it; infinite: as soon as it fits.
        waits: whether a fetch may come where its room must first be freed for it.
        at_once: whether a copy starts when its tensor is made, not when its first gap begins.
    """

    lead: float = math.inf
    waits: bool = True
    at_once: bool = True


TIMINGS = tuple(
    Timing(lead, waits, at_once)
    for lead in (math.inf, 2.0, 1.0)
    for waits in (True, False)
    for at_once in (True, False)
)
