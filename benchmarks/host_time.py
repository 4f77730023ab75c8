"""Host time of planned steps beside eager's: many operators of tiny tensors, one thread.

A step's time is the processor time of its thread, the median of rounds in which every way runs
once, in turn. Calls are those of Python's functions, and from Python of functions written in C, in
one step, by `sys.setprofile`; what autograd calls in its own thread is that thread's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.runner import Benchmark
from memopt.torch_private.modes import TorchDispatchMode
from tests.executor.tiny_gpt import TinyGPT, batch, calls_of, loss_of

WAYS: dict[str, dict[str, Any]] = {
    "store-all": {"strategy": "store-all"},
    "placed": {"strategy": "rotor", "place": True},
    "compiled": {"strategy": "store-all", "kernels": "compiled"},
}
"""Forward and backward under a plan, by `memopt.plan`'s arguments; beside eager's."""
MOST = {
    "store-all": 1.0,
    "placed": 1.05,
    "compiled": 0.8,
    "whole step": 1.0,
    "whole step, foreach": 1.0,
}
"""The largest ratio that each way may have to eager's time."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One way to run a step; `beside` is the eager way that it is compared with."""

    way: str
    beside: str
    step_s: float
    ratio: float
    operators: int
    python_calls: int
    c_calls: int
    failed: str = ""


class _Operators(TorchDispatchMode):
    """Counts the kernels that are called, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))


def _steps(model: nn.Module) -> dict[str, tuple[str, Step]]:
    """Give name → the eager way beside it, and the step."""
    ids, targets = batch()
    call: dict[str, Any] = {"loss_fn": loss_of, "targets": (targets,), "progress": False}

    def of(module: nn.Module) -> Step:
        def step() -> None:
            loss_of(module(ids), targets).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

        return step

    steps: dict[str, tuple[str, Step]] = {"eager": ("eager", of(model))}
    for name, options in WAYS.items():
        steps[name] = "eager", of(memopt.plan(model, ids, **call, **options).apply(model))
    own = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def eager() -> None:
        loss_of(model(ids), targets).backward()  # type: ignore[no-untyped-call]
        own.step()
        own.zero_grad()

    steps["eager, foreach"] = "eager, foreach", eager
    for name, foreach in {"whole step": None, "whole step, foreach": True}.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
        plan = memopt.plan(model, ids, **call, optimizer=optimizer, strategy="store-all")
        steps[name] = (
            "eager, foreach",
            _whole(plan.train_step(model, loss_of, optimizer), ids, targets),
        )
    return steps


def _whole(step: Any, ids: torch.Tensor, targets: torch.Tensor) -> Step:
    return lambda: step(ids, targets=(targets,))


def measure(given: Any) -> list[Row]:
    """Run all ways in turn, and count their calls."""
    torch.manual_seed(0)
    steps = _steps(TinyGPT(given.layers))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
        for _, step in steps.values():
            step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(given.rounds):
            for name, (_, step) in steps.items():
                begin = time.thread_time()
                step()
                times[name].append(time.thread_time() - begin)
    finally:
        gc.enable()
    medians = {name: statistics.median(each) for name, each in times.items()}
    with _Operators() as counted:
        steps["eager"][1]()
    rows = []
    for name, (beside, step) in steps.items():
        python, c = calls_of(step)
        found = medians[name] / medians[beside]
        late = f"{name}: {found:.2f} of {beside}" if found > MOST.get(name, 1.0) else ""
        rows.append(Row(name, beside, medians[name], found, counted.count, python, c, late))
    return rows


def line(row: Row) -> tuple[object, ...]:
    """Write a row of the table."""
    return (
        row.way,
        row.beside,
        f"{row.step_s * 1e3:.2f}",
        f"{row.ratio:.2f}",
        MOST.get(row.way, ""),
        f"{row.python_calls / row.operators:.2f}",
        f"{row.c_calls / row.operators:.2f}",
    )


BENCHMARK = Benchmark(
    cases={"gpt": ()},
    measure=measure,
    row=Row,
    head="way | beside | step ms | ratio | at most | Python calls / operator | C calls / operator",
    line=line,
    summary=lambda rows, _: f"{rows[0].operators} operators in eager's step, views left out.",
    options={"layers": 12, "rounds": 60},
)
