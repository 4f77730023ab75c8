"""Offloaded plans on a GPU: measured time beside the prediction and two peers.

Plans of `offload-graph` at floor + share·(baseline − floor), and at each peer's own peak. Peers:
eager, `save_on_cpu(pin_memory=True)` and streamed saved-tensor hooks. On CPU the plans run with
worker threads, and the peers that copy to host memory have no peak of their own to show.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.gpu.subject import Machine, Row, Subject, stepper
from benchmarks.steps import Step, clear, peak_of
from benchmarks.table import interleaved, ratio
from memopt.step.backend import backend_of

LIMITS = (1.0, 1.05, 1.1, 1.2)
SHARES = (0.0, 0.5)
AT_PEAK = "memopt at the peak of "
SMALLEST_BYTES, UNDER_WAY = 1024, 5
"""Of streamed tensors, and copies."""


class StreamedHooks(torch.autograd.graph.saved_tensors_hooks):
    """Streams every saved tensor but parameters, views of them, and the small ones to pinned
    memory, as torchtune does: a stream of its own, a few copies under way, no plan, no budget."""

    def __init__(self, resident: set[int], device: torch.device) -> None:
        self._resident = resident
        self._device = device
        self._runtime = backend_of(device).runtime
        self._stream = self._runtime.Stream(device)
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        stays = tensor.untyped_storage().data_ptr() in self._resident
        if stays or tensor.nbytes < SMALLEST_BYTES or tensor.device.type != self._device.type:
            return tensor
        compute = self._runtime.current_stream(self._device)
        self._stream.wait_stream(compute)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._runtime.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        end = self._runtime.Event()
        end.record(self._stream)
        # The device tensor is held until its copy is over; then the compute stream may reuse it.
        self._leaving.append((tensor, end))
        while len(self._leaving) > UNDER_WAY:
            _, over = self._leaving.popleft()
            compute.wait_event(over)
        return host, end

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, end = packed
        compute = self._runtime.current_stream(self._device)
        while self._leaving:
            _, over = self._leaving.popleft()
            compute.wait_event(over)
        compute.wait_event(end)
        return host.to(self._device, non_blocking=True)


@contextlib.contextmanager
def limited(device: torch.device, limit_bytes: float) -> Iterator[None]:
    """Let the process hold at most so many bytes of the GPU meanwhile; nothing on CPU."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def limit_that_held(
    model: nn.Module, step: Step, budget: int, device: torch.device
) -> float | None:
    """Find the least of LIMITS, in budgets, under which a step ran; None: none did, or no GPU."""
    if device.type != "cuda":
        return None
    for limit in LIMITS:
        clear(model)  # what the step before, perhaps cut off, has left
        try:
            with limited(device, limit * budget):
                step()
        except torch.cuda.OutOfMemoryError:
            continue
        return limit
    return None


def reserved_bytes(plan: memopt.Plan) -> int:
    """Give what the simulated allocator reserves for a plan within its budget."""
    assert plan.budget is not None
    found = plan.reserved
    return max(plan.budget, found.reserved_peak_bytes if found else 0)


def total_peak_of(
    model: nn.Module, step: Step, device: torch.device, resident_bytes: int, before_bytes: int
) -> int:
    """Measure the whole peak of a step: on a device all that the process has allocated, by its
    allocator's statistics, but what was there before the model; on CPU what the step allocates
    beyond what is resident."""
    above_bytes = peak_of(model, step, device)
    runtime = backend_of(device).runtime
    if runtime is not None:
        return int(runtime.max_memory_allocated(device)) - before_bytes
    return resident_bytes + above_bytes


def peers(model: nn.Module, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Give other people's ways, as contexts around a step."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"eager": contextlib.nullcontext}
    pin = not backend_of(device).on_host
    ways["save_on_cpu"] = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)
    if pin:
        held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        ways["streamed hooks"] = lambda: StreamedHooks(held, device)
    return ways


def measure(machine: Machine, name: str, batch: int) -> Iterator[Row]:
    """Set plans beside all peers, in turn: at shares of the way up, and at each peer's peak."""
    one, device = Subject.of(name, machine, batch), machine.device
    resident_bytes = one.profiled.graph.resident_bytes - backend_of(device).step_scalars_bytes
    ways = peers(one.model, device)
    steps = {way: stepper(one.family, one.model, one.inputs, ways[way]) for way in ways}
    # On CPU the host copies of other ways are device memory, too: no peak to compare with.
    apart = [way for way in steps if not backend_of(device).on_host or way == "eager"]
    peaks = {
        way: total_peak_of(one.model, steps[way], device, resident_bytes, one.before_bytes)
        for way in apart
    }
    how = {"strategy": "offload-graph", "device": memopt.measure_device(device)}
    floor = one.plan(budget="min", **how)
    budgets = {f"memopt {share:g}": one.above(floor, share) for share in SHARES}
    budgets |= {AT_PEAK + way: size for way, size in peaks.items() if size >= floor.peak_bytes}
    plans = {way: one.plan(budget=budget, **how) for way, budget in budgets.items()}
    steps |= {way: one.step(plan.apply(one.model)) for way, plan in plans.items()}
    times = interleaved(one.model, steps, machine.rounds, device)
    predicted = {way: plan.step_time_s for way, plan in plans.items()}
    # Of its kernels: what the eager step takes beyond is the framework's.
    predicted["eager"] = one.profiled.graph.compute_time_s
    for way, found in times.items():
        peer = way.removeprefix(AT_PEAK)
        over = "read" if peer == way else f"{ratio(times, way, peer):.2f} × that peer's"
        expected = f"{1e3 * predicted[way]:.2f}" if way in predicted else ""
        spent = f"{1e3 * statistics.median(found):.2f}"
        yield Row("offloading", name, f"{way}: step ms", expected, spent, over)
