"""Steps of models that do not fit, really run on the CPU: docs/results/moved_steps.md.

The device is torch's allocator, the host memory of numpy's, so that each has its own peak. Every
step is compared with eager's, bit for bit: losses, and after the last parameters and state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import memopt
from benchmarks.runner import Benchmark, Line
from memopt.models.budget import format_bytes
from memopt.programs.moved import carried_over
from tests.whole_steps.accumulated import Pair, deep, rows
from tests.whole_steps.test_moved_parameters import Made, layers, lora

LINK = memopt.Device(to_host_bytes_per_s=5e8)
HOST = memopt.Device(to_host_bytes_per_s=5e8, host_update_bytes_per_s=5e9)
Case = tuple[memopt.Plan, int, int]
"""The plan, bytes of parameters, gradients and state, the measured peak; the steps were eager's."""


def made(model: Callable[[], object], share: float, **options: object) -> Callable[[int], Case]:
    """Make a case of plain steps."""

    def run(steps: int) -> Case:
        one = Made(model(), share, **{"device": LINK, **options})  # type: ignore[arg-type]
        one.run(0, steps)
        one.assert_same()
        states_bytes = one.bytes + 3 * one.trained
        return one.plan, states_bytes, one.metered_peak(2)

    return run


def accumulated(steps: int, **options: object) -> Case:
    """Run four micro-batches, clipped by the global norm."""
    pair = Pair(4, 0.1, make=deep, batches=rows, share=0.25, **{"device": LINK, **options})  # type: ignore[arg-type]
    pair.check_steps(range(steps))
    return pair.plan, pair.states_bytes, pair.metered_peak(2)


CASES: tuple[tuple[str, Callable[[int], Case]], ...] = (
    ("ten linear layers, AdamW", made(lambda: layers(192, 9), 0.25)),
    ("the same, updates on the host", made(lambda: layers(192, 9), 0.25, device=HOST)),
    ("the same, repeated", made(lambda: layers(192, 9), 0.25, repeated=True)),
    ("LoRA, its frozen base on the host", made(lora, 0.4)),
    ("four micro-batches, clipped", accumulated),
    ("the same, repeated", lambda steps: accumulated(steps, steady_state=True)),
)


def _run(given: Any, name: str, case: Callable[[int], Case]) -> list[Line]:
    plan, states_bytes, peak = case(given.steps)
    assert plan.budget is not None
    stays = sum(plan.graph.tensors[t].size_bytes for t in carried_over(plan.graph, plan.program))
    graph = replace(plan.graph, repeated=False)
    once = plan.strategy.solve(graph, plan.budget, device=plan.device)
    assert once.time_s is not None
    times = (plan.step_time_s, once.time_s, plan.lower_bound_s)
    line = (
        f"{name} | {states_bytes:,} ({states_bytes / plan.budget:.1f} × the budget) | "
        f"{plan.budget:,} | {plan.peak_bytes:,} | {peak:,} | {peak / plan.peak_bytes - 1:+.3%} | "
        f"{format_bytes(plan.host_peak_bytes)} | {format_bytes(stays) if stays else '-'} | "
        f"{' | '.join(f'{1e3 * seconds:.2f}' for seconds in times)}"
    )
    return [Line(line)]


BENCHMARK = Benchmark(
    cases={f"{number} {name}": (name, run) for number, (name, run) in enumerate(CASES, 1)},
    measure=_run,
    head="model | parameters, gradients, state | budget | peak predicted | peak measured | "
    "difference | on the host | stays between steps | step ms | not repeated, ms | bound ms",
    options={"steps": 20},
)
