"""Steps of models that do not fit, really run on the CPU: docs/results/moved_steps.md.

    python -m benchmarks.moved_steps [--steps 20] [--out FILE.md]

The device is torch's allocator, the host memory of numpy's, so that each has its own peak. Every
step is compared with eager's, bit for bit: losses, and after the last parameters and state.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import memopt
from memopt.models.budget import format_bytes
from memopt.programs.moved import carried_over
from tests.step.accumulated import Pair, deep, rows
from tests.step.test_moved_parameters import Made, layers, lora

LINK = memopt.Device(to_host_bytes_per_s=5e8)
HOST = memopt.Device(to_host_bytes_per_s=5e8, host_update_bytes_per_s=5e9)

Case = tuple[memopt.Plan, int, int]
"""The plan, bytes of parameters, gradients and state, the measured peak; the steps were eager's."""


def made(model: Callable[[], object], share: float, **options: object) -> Callable[[int], Case]:
    """A case of plain steps."""

    def run(steps: int) -> Case:
        one = Made(model(), share, **{"device": LINK, **options})  # type: ignore[arg-type]
        one.run(0, steps)
        one.assert_same()
        states_bytes = one.bytes + 3 * one.trained
        return one.plan, states_bytes, one.metered_peak(2)

    return run


def accumulated(steps: int, **options: object) -> Case:
    """A case of four micro-batches, clipped by the global norm."""
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
HEAD = (
    "# Steps of models that do not fit\n\n"
    "`python -m benchmarks.moved_steps --out docs/results/moved_steps.md`: {steps} steps of each "
    "on the CPU, device and host accounted apart, losses of each step and parameters and state "
    "after the last equal to eager's, bit for bit. The peak is measured over two steps in a row; "
    "some bytes above the prediction are the optimizer's counters, 4 bytes each, which the first "
    "of them renews and which are counted as resident. "
    "Times are the plan's, with copies at 0.5 GB/s each way (updates on the host at 5 GB/s); "
    "operators were measured anew for each plan. *not repeated*: the step, with the very same "
    "times of its operators, planned without `steady_state=True`.\n\n"
)
COLUMNS = (
    "model",
    "parameters, gradients, state",
    "budget",
    "peak predicted",
    "peak measured",
    "difference",
    "on the host",
    "stays between steps",
    "step ms",
    "not repeated, ms",
    "bound ms",
)


def row(name: str, case: Case) -> str:
    """One line of the table."""
    plan, states_bytes, peak = case
    assert plan.budget is not None
    stays = sum(plan.graph.tensors[t].size_bytes for t in carried_over(plan.graph, plan.program))
    graph = replace(plan.graph, repeated=False)
    once = plan.strategy.solve(graph, plan.budget, device=plan.device)
    assert once.time_s is not None
    cells = (
        name,
        f"{states_bytes:,} ({states_bytes / plan.budget:.1f} × the budget)",
        f"{plan.budget:,}",
        f"{plan.peak_bytes:,}",
        f"{peak:,}",
        f"{peak / plan.peak_bytes - 1:+.3%}",
        format_bytes(plan.host_peak_bytes),
        format_bytes(stays) if stays else "-",
        f"{1e3 * plan.step_time_s:.2f}",
        f"{1e3 * once.time_s:.2f}",
        f"{1e3 * plan.lower_bound_s:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def main(arguments: Iterable[str]) -> None:
    """Run every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args([*arguments])
    text = HEAD.format(steps=options.steps)
    text += "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    for name, run in CASES:
        line = row(name, run(options.steps))
        print(line, flush=True)
        text += line + "\n"
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
