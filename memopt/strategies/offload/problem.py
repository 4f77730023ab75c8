"""The offloading problem of a chain: Offloading §3 under our index map.

x_0 = a^0, x_ℓ = ā^ℓ, y_ℓ = δ^ℓ, F_i = F^{i+1}, B_i = B^{i+1}, ex_i = o^{i+1}, for n = L+1 stages.
Operations are numbered in the order of the step: 0..n-1 are F_0..F_{n-1}, n..2n-1 are
B_{n-1}..B_0. x_i is free after B_{i-1}, the last that reads it; x_0 stays. Parameter gradients
are added to the demand of the backward operations from their stage's on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.models.chain import Chain
from memopt.models.device import Device

Bytes = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


class ProblemArrays(NamedTuple):
    """A problem for compiled code: durations of the operations, bytes that each uses and lacks,
    sizes of x_0..x_n and whether they may move, and the link."""

    durations_s: Seconds
    used: Bytes
    need: Bytes
    sizes: Bytes
    movable: npt.NDArray[np.bool_]
    to_host: float
    from_host: float
    latency_s: float


@dataclass(frozen=True, eq=False)
class OffloadProblem:
    """One chain, one budget, one link. Where `need` > 0, activations must move.

    Attributes:
        chain: the chain of the problem.
        device: the device whose link is used.
        sizes: |x_0|..|x_n|, bytes.
        durations_s: of the 2n operations, seconds.
        held_bytes: Σ|x_j| that the operation finds or makes, all on the device.
        demand_bytes: its further need: ex, gradients, parameter gradients.
        between_bytes: the part of that in memory before it starts: gradients.
        capacity_bytes: M_GPU: the budget without the resident bytes.
        movable: whether x_j may leave the device.
        to_host_bytes_per_s: β, device → host.
        from_host_bytes_per_s: β, host → device.
        latency_s: added to every transfer; 0 in the paper.
    """

    chain: Chain
    device: Device
    sizes: Bytes
    durations_s: Seconds
    held_bytes: Bytes
    demand_bytes: Bytes
    between_bytes: Bytes
    capacity_bytes: int
    movable: npt.NDArray[np.bool_]
    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    latency_s: float = 0.0

    @property
    def stages(self) -> int:
        """Return n, the loss included."""
        return len(self.sizes) - 1

    @cached_property
    def used_bytes(self) -> Bytes:
        """Return the memory during each operation without any offloading, resident excluded."""
        return self.held_bytes + self.demand_bytes

    @cached_property
    def need_bytes(self) -> Bytes:
        """Return bytes that must be off the device during each operation; below 0, room is left."""
        return self.used_bytes - self.capacity_bytes

    @cached_property
    def arrays(self) -> ProblemArrays:
        """Return the problem for compiled code."""
        return ProblemArrays(
            self.durations_s,
            self.used_bytes,
            self.need_bytes,
            self.sizes,
            self.movable,
            float(self.to_host_bytes_per_s),
            float(self.from_host_bytes_per_s),
            float(self.latency_s),
        )

    @cached_property
    def peak_bytes(self) -> int:
        """Return M_peak (§3.2): memory without any offloading, resident excluded."""
        return int(self.used_bytes.max())

    @cached_property
    def floor_bytes(self) -> int:
        """Return the smallest capacity any schedule can meet: everything movable is offloaded."""
        return self.least_capacity(np.where(self.movable, self.sizes, 0))

    @property
    def excess_bytes(self) -> int:
        """Return max(0, M_peak - M), which every schedule offloads (Proposition 2)."""
        return max(0, self.peak_bytes - self.capacity_bytes)

    @property
    def compute_time_s(self) -> float:
        """Return Σ (u_F + u_B), seconds."""
        return float(self.durations_s.sum())

    def amounts(self, offloaded: npt.ArrayLike) -> Bytes:
        """Return the bytes of each x_j that are off the device if the listed activations are, and
        no others."""
        amounts = np.zeros_like(self.sizes)
        chosen = np.asarray(offloaded, dtype=np.int64)
        amounts[chosen] = self.sizes[chosen]
        return amounts

    def fits(self, amounts: Bytes) -> bool:
        """Tell whether every operation fits with the amounts it does not touch off the device."""
        return self.least_capacity(amounts) <= self.capacity_bytes

    def least_capacity(self, amounts: Bytes) -> int:
        """Return the smallest capacity that suffices once the amounts are off the device."""
        before = np.concatenate(([0], np.cumsum(amounts)))
        index = np.arange(self.stages)
        away = before[np.concatenate((index, index[::-1]))]
        return int((self.used_bytes - away).max())


def offload_problem(
    chain: Chain, budget_bytes: int | None, device: Device, *, offload_input: bool = True
) -> OffloadProblem:
    """Make the offloading problem of a chain under a budget.

    An overhead below zero never takes an operation's demand below what it starts with, so that
    memory between operations, where a prefetch may begin, needs no constraint of its own. The last
    two activations, which F_{n-1} and B_{n-1} both touch, never move: nothing runs between.

    Args:
        chain: n stages, the loss last.
        budget_bytes: total bytes, resident included; None: no limit.
        device: link rates and latency. Whether both directions overlap makes no difference to
            ordered schedules: the last copy to the host comes before the first one back.
        offload_input: whether a^0 may move; False where the caller keeps it on the device.
    """
    stages = chain.stages
    n = len(stages)
    sizes = np.array([chain.input_bytes, *(s.saved_bytes for s in stages)], dtype=np.int64)
    movable = sizes > 0
    movable[n - 1 :] = False
    movable[0] &= offload_input
    made = np.cumsum(sizes)[1:]
    forward = [max(s.forward_overhead_bytes, -s.saved_bytes) for s in stages]
    backward = np.zeros(n, dtype=np.int64)
    between = np.zeros(n, dtype=np.int64)
    parameter_gradients = 0
    for i in reversed(range(n)):
        stage = stages[i]
        output = chain.gradient_bytes(i) + stage.parameter_gradient_bytes
        held = chain.gradient_bytes(i + 1) + parameter_gradients
        backward[i] = held + max(0, output + stage.backward_overhead_bytes)
        # δ^n arrives with the first backward operation.
        between[i] = held if i < n - 1 else 0
        parameter_gradients += stage.parameter_gradient_bytes
    problem = OffloadProblem(
        chain=chain,
        device=device,
        sizes=sizes,
        durations_s=np.array(
            [s.forward_time_s for s in stages] + [s.backward_time_s for s in reversed(stages)],
            dtype=np.float64,
        ),
        held_bytes=np.concatenate((made, made[::-1])),
        demand_bytes=np.concatenate((np.array(forward, dtype=np.int64), backward[::-1])),
        between_bytes=np.concatenate((np.zeros(n, dtype=np.int64), between[::-1])),
        capacity_bytes=0,
        movable=movable,
        to_host_bytes_per_s=device.to_host_bytes_per_s,
        from_host_bytes_per_s=device.swap_in_bytes_per_s,
        latency_s=device.transfer_latency_s,
    )
    capacity = problem.peak_bytes if budget_bytes is None else budget_bytes - chain.resident_bytes
    return replace(problem, capacity_bytes=capacity)
