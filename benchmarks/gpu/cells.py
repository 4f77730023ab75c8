"""The checks and measurements of the day when a GPU is there, most valuable first.

Each cell is one thing to know of one model; it returns rows of a table. On the CPU, at tiny sizes,
every one of them runs as well: what CUDA alone has (limits, snapshots, graphs) has a stand-in.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.gpu.allocator_snapshot import compare_snapshot
from benchmarks.gpu.offload import limit_that_held, measure, reserved_bytes, total_peak_of
from benchmarks.gpu.subject import Machine, Row, Subject
from benchmarks.steps import clear, difference
from benchmarks.table import interleaved, mib
from memopt.executor.apply import apply_plan
from memopt.executor.cuda_graph import WARM_UP
from memopt.executor.graph_segments import Capturer
from memopt.models.presets import find_device
from memopt.programs.allocator_requests import Allocate, allocation_trace
from memopt.programs.caching_allocator import CachingAllocator
from memopt.step.backend import backend_of
from tests.executor.fake_graphs import FakeGraphs

CLOSE = 1e-3
"""Gradients on CUDA, whose kernels add in any order: largest difference over largest gradient, at
least; ten times what eager's own second run differs by, where that is more."""
PEAK_ERROR, TIME_ERROR = 0.01, 0.10


def same_gradients(cell: str, one: Subject, module: nn.Module, machine: Machine, what: str) -> Row:
    """Compare a module's gradients with eager's: bitwise on the CPU, within rounding on CUDA."""
    state = {key: value.cpu().clone() for key, value in one.model.state_dict().items()}
    expected, again, found = (one.gradients(way, state) for way in (one.model, one.model, module))
    noise, differs = difference(expected, again), difference(expected, found)
    allowed = max(CLOSE, 10 * noise) if machine.is_cuda else 0.0
    cells = (f"{what}: gradients", f"≤ {allowed:.1e}", f"{differs:.1e}")
    return Row(cell, one.family.name, *cells, "ok" if differs <= allowed else "no")


def families(machine: Machine, name: str, strategy: str, batch: int) -> Iterator[Row]:
    """Run a family at its smallest budget and half way up: gradients, the budget enforced, peak and
    time as predicted."""
    one = Subject.of(name, machine, batch)
    device = machine.device
    how = {"device": memopt.measure_device(device), "time_limit_s": machine.limit_s}
    floor = one.plan(strategy, "min", **how)
    plans = {"min": floor, "half": one.plan(strategy, one.above(floor, 0.5), **how)}
    resident = one.profiled.graph.resident_bytes - backend_of(device).step_scalars_bytes
    row = partial(Row, "families", one.family.name)
    for share, plan in plans.items():
        module = plan.apply(one.model)
        what = f"{strategy} {share}"
        yield same_gradients("families", one, module, machine, what)
        step = one.step(module)
        measured = total_peak_of(one.model, step, device, resident, one.before_bytes)
        near = _near(measured / plan.peak_bytes - 1, PEAK_ERROR)
        yield row(f"{what}: peak MiB", mib(plan.peak_bytes), mib(measured), near)
        assert plan.budget is not None
        promised = reserved_bytes(plan) + one.before_bytes
        held = limit_that_held(one.model, step, promised, device)
        ran = f"{held:g}" if held else "not limited here"
        yield row(f"{what}: runs in reserved ×", "1", ran, "ok" if held == 1 else "read")
        times = interleaved(one.model, {"plan": step}, machine.rounds, device)["plan"]
        spent, planned = statistics.median(times), plan.step_time_s
        near = _near(spent / planned - 1, TIME_ERROR)
        yield row(f"{what}: step ms", f"{1e3 * planned:.2f}", f"{1e3 * spent:.2f}", near)


def _near(error: float, allowed: float) -> str:
    return f"ok {error:+.1%}" if abs(error) <= allowed else f"read {error:+.1%}"


def snapshot(machine: Machine, name: str, batch: int) -> Iterator[Row]:
    """Compare what the device's allocator did with the simulation; run in a process of its own,
    whose trace is whole."""
    if machine.is_cuda:
        torch.cuda.memory._record_memory_history(max_entries=10**6)
    one = Subject.of(name, machine, batch)
    plan = one.plan(budget="min")
    step = one.step(plan.apply(one.model))
    for _ in range(3):
        step()
        clear(one.model)
    found = compare_snapshot(torch.cuda.memory._snapshot() if machine.is_cuda else simulated(plan))
    at = "" if found.is_same else f", differs at request {found.differs_at}"
    what = f"reserved MiB over {found.requests} requests{at}"
    peaks = (mib(found.simulated_peak_bytes), mib(found.device_peak_bytes))
    yield Row("snapshots", one.family.name, what, *peaks, "ok" if found.is_same else "no")


def simulated(plan: memopt.Plan) -> dict[str, Any]:
    """Make a snapshot of a plan's requests as the simulation serves them, for the dry run."""
    allocator, events, where = CachingAllocator(), [], {}
    for request in allocation_trace(plan.graph, plan.program, 2):
        before = allocator.reserved_bytes
        if isinstance(request, Allocate):
            address = allocator.allocate(request.id, request.size_bytes)
            if address is None:
                continue
            where[request.id] = address
            grown = allocator.reserved_bytes - before
            if grown:
                events.append(_event("segment_alloc", address, grown))
            events.append(_event("alloc", address, request.size_bytes))
        elif allocator.holds(request.id):
            allocator.release(request.id)
            events.append(_event("free_completed", where.pop(request.id), 0))
    return {"device_traces": [events], "segments": [], "allocator_settings": {}}


def _event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def calibration(machine: Machine) -> Iterator[Row]:
    """Set the device as measured beside the preset that estimates use."""
    preset = find_device("H100" if machine.is_cuda else "cpu-core")
    found = memopt.measure_device(machine.device)
    figures = {
        f"{dtype} Tflop/s": (1e12, preset.flops_per_s[dtype] * preset.flops_fraction, rate)
        for dtype in ("float32", "bfloat16")
        if (rate := found.flops_per_s.get(dtype)) is not None
    }
    memory = preset.memory_bytes_per_s * preset.memory_fraction
    figures |= {
        "memory GB/s": (1e9, memory, found.memory_bytes_per_s),
        "to host GB/s": (1e9, preset.to_host_bytes_per_s, found.to_host_bytes_per_s),
        "from host GB/s": (1e9, preset.swap_in_bytes_per_s, found.swap_in_bytes_per_s),
    }
    for what, (unit, expected, rate) in figures.items():
        values = (f"{expected / unit:.2f}", f"{rate / unit:.2f}", _near(rate / expected - 1, 0.2))
        yield Row("calibration", preset.name, what, *values)


def graphs(machine: Machine, name: str, batch: int, strategy: str = "store-all") -> Iterator[Row]:
    """Run a placed plan's step with and without CUDA graphs: with dropout, and transfers where
    there are any, in segments where dropout runs twice. A replay draws what the uncaptured step
    would."""
    one = Subject.of(name, machine, batch)
    budget = None if strategy == "store-all" else 0.8
    device = memopt.measure_device(machine.device)
    plan = one.plan(strategy, budget, device=device, place=True)
    plan = replace(plan, budget=None)  # beside it are the capture's copies
    plain = plan.apply(one.model)
    captured = apply_plan(plan, one.model, cuda_graph=_capturer(machine))
    for _ in range(WARM_UP + 1):
        one.step(captured)()
    yield same_gradients("CUDA graphs", one, captured, machine, "replayed")
    steps = {"plan": one.step(plain), "graphs": one.step(captured)}
    yield from _times("CUDA graphs", one, steps, machine, "plan")


def _capturer(machine: Machine) -> bool | Capturer:
    if machine.device.type in ("cuda", "cpu"):
        return machine.is_cuda or FakeGraphs()
    from tests.device.recorded_graphs import RecordedGraphs  # where that device is loaded

    return RecordedGraphs(machine.device)


def kernels(machine: Machine, name: str, batch: int) -> Iterator[Row]:
    """Set compiled kernels beside aten's, at the same budget."""
    one = Subject.of(name, machine, batch)
    aten = one.plan()
    how = {"strategy": "rotor", "budget": aten.peak_bytes, "progress": False}
    how |= {"kernels": "compiled", "loss_fn": one.family.loss}
    plans = {"aten": aten, "compiled": memopt.plan(one.model, one.inputs, **how)}
    steps = {way: one.step(plan.apply(one.model)) for way, plan in plans.items()}
    yield from _times("compiled kernels", one, steps, machine, "aten")


def joint(machine: Machine, name: str, batch: int) -> Iterator[Row]:
    """Set a joint plan at a third of the way up beside Rotor's: gradients and time."""
    one = Subject.of(name, machine, batch)
    how = {"device": memopt.measure_device(machine.device)}
    budget = one.above(one.plan("auto", "min", **how), 1 / 3)
    how |= {"budget": budget, "time_limit_s": machine.limit_s or 20.0}
    plans = {strategy: one.plan(strategy, **how) for strategy in ("rotor", "joint")}
    modules = {way: plan.apply(one.model) for way, plan in plans.items()}
    yield same_gradients("joint", one, modules["joint"], machine, "joint")
    steps = {way: one.step(module) for way, module in modules.items()}
    yield from _times("joint", one, steps, machine, "rotor")


def peers(machine: Machine, name: str, batch: int) -> Iterator[Row]:
    """Set eager, torch.compile and Hugging Face's checkpointing beside a plan's smallest budget."""
    one = Subject.of(name, machine, batch)
    device = machine.device
    eager = one.step(one.model)
    # In a dry run the compiler itself, which takes minutes on a CPU, is left out.
    compiler = "inductor" if machine.is_cuda else "aot_eager"
    compiled = torch.compile(one.model, backend=compiler)
    steps = {"eager": eager, "torch.compile": one.step(compiled)}
    enable = getattr(one.model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable()
        peak = total_peak_of(one.model, eager, device, 0, one.before_bytes)
        clear(one.model)
        begin = time.perf_counter()
        eager()
        backend_of(device).synchronize(device)
        figures = f"{mib(peak)}, {1e3 * (time.perf_counter() - begin):.2f}"
        one.model.gradient_checkpointing_disable()
        yield Row("peers", name, "checkpointing: peak MiB, step ms", "", figures, "read")
    steps["memopt min"] = one.step(one.plan(budget="min").apply(one.model))
    yield from _times("peers", one, steps, machine, "eager")


def _times(
    cell: str, one: Subject, steps: dict[str, Callable[[], None]], machine: Machine, base: str
) -> Iterator[Row]:
    times = interleaved(one.model, steps, machine.rounds, machine.device)
    medians = {way: statistics.median(found) for way, found in times.items()}
    first = medians[base]
    for way, spent in medians.items():
        figures = (f"{1e3 * first:.2f}", f"{1e3 * spent:.2f}", f"{spent / first:.2f} ×")
        yield Row(cell, one.family.name, f"{way}: step ms", *figures)
    gc.collect()


Cell = Callable[[Machine], Iterator[Row]]
CELLS: dict[str, Cell] = {
    **{
        f"families {name} {strategy}": partial(families, name=name, strategy=strategy, batch=batch)
        for name, batch in (("resnet50", 64), ("gpt2", 16))
        for strategy in ("rotor", "offload-graph")
    },
    "snapshots resnet50": partial(snapshot, name="resnet50", batch=64),
    "snapshots gpt2": partial(snapshot, name="gpt2", batch=16),
    "calibration": calibration,
    "families vit_b_16 rotor": partial(families, name="vit_b_16", strategy="rotor", batch=32),
    "families unet olla": partial(families, name="unet", strategy="olla", batch=4),
    "CUDA graphs mlp": partial(graphs, name="mlp", batch=32),
    "CUDA graphs resnet50": partial(graphs, name="resnet50", batch=16),
    "CUDA graphs gpt2": partial(graphs, name="gpt2", batch=4),
    "CUDA graphs gpt2 moved": partial(graphs, name="gpt2", batch=4, strategy="offload-graph"),
    "CUDA graphs gpt2 segments": partial(graphs, name="gpt2", batch=4, strategy="rotor"),
    "joint resnet50": partial(joint, name="resnet50", batch=64),
    "peers gpt2": partial(peers, name="gpt2", batch=16),
    "compiled kernels mlp": partial(kernels, name="mlp", batch=256),
    "offloading gpt2_medium": partial(measure, name="gpt2_medium", batch=8),
}
"""Most valuable first: what nobody has ever seen run decides, the comparisons come after it."""
