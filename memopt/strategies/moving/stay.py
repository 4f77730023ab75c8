"""When a moved tensor is on the device, including from one step into the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memopt.models.device import Device

Ints = npt.NDArray[np.int64]


@dataclass(eq=False)
class Stay:
    """A stretch of instructions during which a tensor is on the device, both ends included.

    Attributes:
        before: the same tensor's stay before this one, which an early copy may meet.
        carried: whether it continues a stay that began in the step before with an update; the new
            value is copied to the host now.
        leaves: whether it continues in the next step.
    """

    tensor: int
    begin: int
    end: int
    before: Stay | None = field(default=None, repr=False)
    carried: bool = False
    leaves: bool = False

    @property
    def joins(self) -> bool:
        """Tell whether it begins where the tensor's stay before it ends, so that nothing is copied
        between them."""
        return self.before is not None and self.before.end + 1 == self.begin


def linked(stays: Iterable[Stay]) -> list[Stay]:
    """Link the stays of one tensor, each to the one before."""
    found = list(stays)
    for first, second in pairwise(found):
        second.before = first
    return found


@dataclass(frozen=True)
class Seam:
    """The seam between a step and the next one.

    Attributes:
        changed: tensor → the instruction that updates it.
        starts_s: when each instruction starts, if the moves go as expected.
        device: link rates.
        size: bytes of a tensor.
        budget_bytes: total.
        most_bytes: the most that may stay on the device from one step to the next.
    """

    changed: Mapping[int, int]
    starts_s: npt.NDArray[np.float64]
    device: Device
    size: Callable[[int], int]
    budget_bytes: int
    most_bytes: int

    def carry(self, stays: dict[int, list[Stay]], used: Ints) -> float:
        """Let the tensors updated last stay on the device until the next step's forward has hidden
        their copies to the host, or reads them.

        Args:
            stays: of each tensor, in order; changed here. Tensors that need not move are removed.
            used: bytes in use during each instruction; changed here.

        Returns:
            When the link to the host has finished these copies, in seconds of the next step.
        """
        busy_s, left, last = 0.0, self.most_bytes, len(used) - 1
        for tensor in sorted(stays, key=lambda t: (-self.changed.get(t, -1), t)):
            size, own = self.size(tensor), stays[tensor]
            first, tail = own[0], own[-1]
            if tensor not in self.changed or size > left:
                continue
            done_s = busy_s + self.device.swap_out_time_s(size)
            end = max(0, bisect_left(self.starts_s, done_s) - 1)
            if not self._fits(used[tail.end + 1 :], size):
                continue
            if self._fits(used[: first.begin], size):
                end = first.begin - 1  # it waits for its reader
            elif end >= first.begin or not self._fits(used[: end + 1], size):
                continue
            used[tail.end + 1 :] += size
            used[: end + 1] += size
            left -= size
            if first is tail and end + 1 == first.begin:
                del stays[tensor]
                continue
            tail.end, tail.leaves, busy_s = last, True, done_s
            own.insert(0, Stay(tensor, 0, end, carried=True))
        return busy_s

    def _fits(self, used: Ints, size: int) -> bool:
        return int(used.max(initial=0)) + size <= self.budget_bytes
