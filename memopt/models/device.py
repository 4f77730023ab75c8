"""The device a step runs on: capacity, link, and roofline rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memopt.models.checks import MOST_SECONDS, check_rate
from memopt.models.codec import SPARSE, Rate
from memopt.models.collective import Collective
from memopt.models.network import Network


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device and its link to host memory.

    Attributes:
        name: "cpu", "A100-80GB"...
        capacity_bytes: device memory; None: unknown.
        to_host_bytes_per_s: bandwidth device → host (swap-out).
        from_host_bytes_per_s: bandwidth host → device (swap-in); None: the same.
        transfer_latency_s: per transfer, seconds.
        duplex: whether both directions overlap; False: one transfer at a time in all.
        flops_per_s: peak flops by dtype name ("float32", "bfloat16"...). An entry for a dtype and
            a kind of operator ("bfloat16 attention", "float32 softmax") is the achieved rate, in
            the operations of `memopt.pricing.flops`; no fraction is applied to it.
        memory_bytes_per_s: device memory bandwidth.
        launch_latency_s: per kernel, seconds.
        flops_fraction: achievable share of peak flops.
        memory_fraction: achievable share of the memory bandwidth.
        block_bytes: the allocator's granularity: 512 on CUDA, 1 on CPU.
        source: where the figures come from.
        kind: by which device's rules an estimate goes, torch's `device.type`: "cuda", "xpu"...; "":
            CUDA's if `block_bytes` is above 1, else the CPU's.
        host_update_bytes_per_s: parameter, gradient and optimizer state that an update on the host
            reads and writes in a second; None: unknown, and updates run on the device.
        product_exposure: how often the shorter of a matrix product's two times, arithmetic and
            memory, is added to the longer: 0 is a roofline. Tiles are read more than once, and
            their first reads and last writes hide behind no arithmetic.
        network: connects it with the other ranks of a cluster; None: unknown, and
            collectives count as free.
    """

    name: str = "device"
    capacity_bytes: int | None = None
    to_host_bytes_per_s: Rate = math.inf
    from_host_bytes_per_s: Rate | None = None
    transfer_latency_s: float = 0.0
    duplex: bool = True
    flops_per_s: dict[str, Rate] = field(default_factory=dict)
    memory_bytes_per_s: Rate = math.inf
    launch_latency_s: float = 0.0
    flops_fraction: float = 1.0
    memory_fraction: float = 1.0
    block_bytes: int = 1
    source: str = ""
    network: Network | None = field(default=None, metadata=SPARSE)
    host_update_bytes_per_s: Rate | None = field(default=None, metadata=SPARSE)
    kind: str = field(default="", metadata=SPARSE)
    product_exposure: float = field(default=0.0, metadata=SPARSE)

    def __post_init__(self) -> None:
        rates = {
            "to_host_bytes_per_s": self.to_host_bytes_per_s,
            "from_host_bytes_per_s": self.swap_in_bytes_per_s,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            **{f"flops_per_s[{k!r}]": v for k, v in self.flops_per_s.items()},
            "host_update_bytes_per_s": 1.0
            if self.host_update_bytes_per_s is None
            else self.host_update_bytes_per_s,
        }
        for name, value in rates.items():
            check_rate(f"Device {self.name!r}", name, value)
        for name in ("transfer_latency_s", "launch_latency_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= MOST_SECONDS:
                raise ValueError(f"Device {self.name!r}: {name} must be at least 0, got {value!r}")
        for name in ("flops_fraction", "memory_fraction"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"Device {self.name!r}: {name} must be in (0, 1], got {value!r}")
        if not 0 <= self.product_exposure < math.inf:
            raise ValueError(
                f"Device {self.name!r}: product_exposure must be at least 0, "
                f"got {self.product_exposure!r}"
            )
        if self.block_bytes < 1:
            raise ValueError(f"Device {self.name!r}: block_bytes must be at least 1")

    @property
    def swap_in_bytes_per_s(self) -> float:
        """Host → device bandwidth with the default resolved."""
        if self.from_host_bytes_per_s is None:
            return self.to_host_bytes_per_s
        return self.from_host_bytes_per_s

    @property
    def rules(self) -> str:
        """The kind with the default resolved."""
        return self.kind or ("cuda" if self.block_bytes > 1 else "cpu")

    @property
    def is_linked(self) -> bool:
        """Whether the link's speed is known; if not, every transfer looks free."""
        return math.isfinite(self.to_host_bytes_per_s)

    def swap_out_time_s(self, size_bytes: int) -> float:
        """Return the seconds to copy `size_bytes` to the host."""
        return self.transfer_latency_s + size_bytes / self.to_host_bytes_per_s

    def swap_in_time_s(self, size_bytes: int) -> float:
        """Return the seconds to copy `size_bytes` from the host."""
        return self.transfer_latency_s + size_bytes / self.swap_in_bytes_per_s

    def collective_time_s(self, collective: Collective) -> float:
        """Return the seconds that a collective takes on an idle network."""
        return self.network.time_s(collective) if self.network else 0.0

    def allocated_bytes(self, size_bytes: int) -> int:
        """Return the bytes that the allocator counts for a request of `size_bytes`."""
        return in_blocks(size_bytes, self.block_bytes)


def in_blocks(size_bytes: int, block_bytes: int) -> int:
    """Return the bytes of an allocation, in whole blocks of the allocator."""
    return -(-size_bytes // block_bytes) * block_bytes
