"""Measures the present machine: link, memory bandwidth, and rates by kind of operator.

Each figure is the best of several short runs on tensors of a few MiB, each from cold caches and
behind other work of the device. On a CPU "host" and "device" are the same memory; a transfer is a
copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from memopt.models.device import Device
from memopt.pricing.device_probes import PROBES, STREAM_ELEMENTS, STREAMS, best_s, fastest_s
from memopt.pricing.measure import environment
from memopt.step.accelerator import accelerator_kind
from memopt.step.backend import backend_of, random_state_kept, timed

_COPY_BYTES = 64 * 2**20
_SQUARE = 512


def measure_device(device: torch.device | str | None = None) -> Device:
    """Measure a device of this machine, in about two seconds.

    Args:
        device: "cpu", "cuda:1"...; None: the machine's accelerator if it has one, else the CPU.

    Returns:
        The Device. Its rates are those achieved, so its fractions are 1.
    """
    place = torch.device(device or accelerator_kind() or "cpu")
    with torch.no_grad(), random_state_kept([place]):
        if backend_of(place).on_host:
            # The C allocator sees a large block come and go, as in any training process: glibc then
            # keeps freed blocks of up to 32 MiB, instead of fresh pages for every small operator.
            torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
        to_host, from_host, duplex = _link(place)
        return Device(
            name=environment(place),
            capacity_bytes=_capacity(place),
            to_host_bytes_per_s=to_host,
            from_host_bytes_per_s=from_host,
            transfer_latency_s=10e-6,
            duplex=duplex,
            flops_per_s=_rates(place),
            memory_bytes_per_s=_bandwidth(place),
            launch_latency_s=_launch(place),
            block_bytes=backend_of(place).block_bytes,
            kind=place.type,
            host_update_bytes_per_s=None if backend_of(place).on_host else host_update_rate(),
            source="measured by memopt.measure_device",
        )


def host_update_rate() -> float:
    """Return the bytes of parameter, gradient and state that a fused AdamW step on the host reads
    and writes per second. (Where the device is the host, updates gain nothing from that.)"""
    elements = STREAM_ELEMENTS * STREAMS
    with torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(elements, device="cpu"))
    parameter.grad = torch.ones(elements, device="cpu")
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    state = optimizer.state[parameter]
    held = [parameter, *(value for value in state.values() if value.dim())]
    moved_bytes: float = parameter.grad.nbytes + 2 * sum(tensor.nbytes for tensor in held)
    return moved_bytes / best_s(torch.device("cpu"), optimizer.step)


def _capacity(place: torch.device) -> int | None:
    runtime = backend_of(place).runtime
    if runtime is None:
        return None
    free, _ = runtime.mem_get_info(place)
    return int(free) + int(runtime.memory_reserved(place))


def _link(place: torch.device) -> tuple[float, float, bool]:
    """Return bytes per second to and from the host, and whether the directions overlap. If they do,
    the rates are those of both at once."""
    runtime = backend_of(place).runtime
    queued = runtime is not None
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=place)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=queued)
    here.fill_(1)
    there.copy_(here)

    def copied_s(run: Callable[[], object]) -> float:
        return fastest_s(run, lambda: timed(run, place))  # on streams of their own

    out_s = copied_s(lambda: here.copy_(there, non_blocking=queued))
    in_s = copied_s(lambda: there.copy_(here, non_blocking=queued))
    if runtime is None:
        return _COPY_BYTES / out_s, _COPY_BYTES / in_s, True
    other_here, other_there = here.clone().pin_memory(), there.clone()
    outward, inward = runtime.Stream(place), runtime.Stream(place)

    def both() -> None:
        with runtime.stream(outward):
            here.copy_(there, non_blocking=True)
        with runtime.stream(inward):
            other_there.copy_(other_here, non_blocking=True)

    return at_once(_COPY_BYTES / out_s, _COPY_BYTES / in_s, copied_s(both) / _COPY_BYTES)


def at_once(out_rate: float, in_rate: float, both_s: float) -> tuple[float, float, bool]:
    """Return the rates of a link whose directions are used together, and whether they overlap.

    Args:
        out_rate, in_rate: bytes per second of each direction alone.
        both_s: seconds until a byte has gone each way, both started together.
    """
    out_s, in_s = 1 / out_rate, 1 / in_rate
    if both_s >= 0.75 * (out_s + in_s):
        return out_rate, in_rate, False
    # A cause that slows the slower direction slows both.
    kept = min(1.0, max(out_s, in_s) / both_s)
    return kept * out_rate, kept * in_rate, True


def _bandwidth(place: torch.device) -> float:
    """Measure the memory bandwidth, bytes per second: by additions of tensors that are too large
    together for any cache, each with a result of its own."""
    elements = STREAM_ELEMENTS * (1 if backend_of(place).on_host else 16)
    left = [torch.rand(elements, device=place) for _ in range(STREAMS)]
    right = [torch.rand(elements, device=place) for _ in range(STREAMS)]
    moved = 12 * elements * STREAMS

    def run() -> list[torch.Tensor]:
        return [a + b for a, b in zip(left, right, strict=True)]

    return moved / best_s(place, run, STREAMS)


def _launch(place: torch.device) -> float:
    """Return the seconds per small kernel launched back to back, as generated code does."""
    small = torch.zeros(16, device=place)
    count = 100

    def run() -> None:
        for _ in range(count):
            torch.ops.aten.threshold_backward.default(small, small, 0)

    return best_s(place, run, count) / count


def _rates(place: torch.device) -> dict[str, float]:
    rates = {}
    scale = 1 if backend_of(place).on_host else 8
    size = _SQUARE * scale
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        left = torch.rand(size, size, device=place).to(dtype)
        seconds = best_s(place, partial(torch.matmul, left, left))
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    for probes in PROBES:
        for name, (operations, run) in probes(place, scale).items():
            rates[f"float32 {name}"] = operations / best_s(place, run)
    return rates
