"""The dynamic program's data, unrounded or in slots (Offloading §5.3.2).

The paper rounds ex, |y| and the sizes of an operation's own activations up one by one. Here the
room that an operation leaves for data it does not touch is rounded down once. That is safe and
loses less: at the smallest budget it leaves exactly 0, whatever the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds


class RecurrenceData(NamedTuple):
    """The input of the recurrences, in units (slots, or bytes), for operations i = 0..n-1.

    Attributes:
        unit_bytes: bytes in a unit.
        sizes: |x_i|.
        movable: whether x_i may be offloaded.
        moved_f: u_{F_i}·β, units that the link moves to the host during F_i.
        moved_b: u_{B_i}·β, units that it brings back during B_i.
        room_f: M - ex^F_i - |x_i| - |x_{i+1}|, which F_i leaves for x_0..x_{i-1}.
        room_b: the same for B_i, with its gradients.
        peak_f: the need of F_i beyond M and the data kept among x_0..x_{n-1}: it turns (10) into
            kept + Δ + peak ≤ units moved by then.
        peak_b: the same for B_i and (9).
        ratio: time to bring a unit back over the time to move it to the host.
    """

    unit_bytes: float
    sizes: Seconds
    movable: npt.NDArray[np.bool_]
    moved_f: Seconds
    moved_b: Seconds
    room_f: Seconds
    room_b: Seconds
    peak_f: Seconds
    peak_b: Seconds
    ratio: float

    def with_sizes(self, sizes: Seconds) -> RecurrenceData:
        """Return the same data with other rounded sizes. Sizes rounded to zero do not move."""
        return self._replace(sizes=sizes, movable=self.movable & (sizes > 0))


def recurrence_data(problem: OffloadProblem, slots: int | None) -> RecurrenceData:
    """Convert a problem to bytes (slots None) or to `slots` slots of its capacity.

    Rounded: rooms down, peaks up, the partial sums of u·β down, the partial sums of |x_i| up. The
    last is optimistic: the data kept may be more than the slots say (see `bump`).
    """
    n = problem.stages
    unit = 1.0 if slots is None else max(1.0, problem.capacity_bytes / slots)
    total = problem.used_bytes
    # Room beside an operation's own activations, all others gone.
    own = np.concatenate(([0], np.cumsum(problem.sizes)))[:n]
    room_f = problem.capacity_bytes - total[:n] + own
    room_b = problem.capacity_bytes - total[n:][::-1] + own
    kept_all = int(problem.sizes[:n].sum())
    forward = problem.durations_s[:n] * problem.to_host_bytes_per_s
    backward = problem.durations_s[n:][::-1] * problem.from_host_bytes_per_s
    # total counts x_0..x_{j+1}; less kept x_0..x_{n-1} it is what remains beyond them.
    peak_f = total[:n] - problem.capacity_bytes - kept_all
    peak_b = total[n:][::-1] - problem.capacity_bytes - kept_all
    sizes = problem.sizes[:n]
    return RecurrenceData(
        unit_bytes=unit,
        sizes=_partial_sums(sizes, unit, np.ceil),
        movable=problem.movable[:n],
        moved_f=_partial_sums(forward, unit, np.floor) if slots else forward,
        moved_b=_partial_sums(backward, unit, np.floor) if slots else backward,
        room_f=np.floor(room_f / unit),
        room_b=np.floor(room_b / unit),
        peak_f=np.ceil(peak_f / unit),
        peak_b=np.ceil(peak_b / unit),
        ratio=problem.to_host_bytes_per_s / problem.from_host_bytes_per_s,
    ).with_sizes(_partial_sums(sizes, unit, np.ceil))


def bump(sizes: Seconds, exact: Seconds, candidates: npt.NDArray[np.bool_]) -> bool:
    """Add a slot to the candidate whose rounded size is below its size, but closest to it.

    Returns False if every candidate is rounded up already.
    """
    below = np.where(candidates & (sizes < exact), exact - sizes, np.inf)
    i = int(np.argmin(below))
    if not np.isfinite(below[i]):
        return False
    sizes[i] += 1
    return True


def _partial_sums(values: Seconds | Bytes, unit: float, rounding: np.ufunc) -> Seconds:
    """Return the differences of the rounded partial sums of `values`, in units."""
    sums: Seconds = rounding(np.concatenate(([0.0], np.cumsum(values))) / unit)
    return np.diff(sums)
