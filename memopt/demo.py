"""The demo: two real models, trained eagerly and under memopt at three budgets, side by side.

Weights are random. Data come with installed packages: scikit-learn's digits for ResNet-50, the
text of Python's own documentation, byte by byte, for a 12-layer GPT-2. Without transformers and
torchvision it is one model, a decoder in plain torch.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from operator import truediv
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memopt.api.plan import Plan
from memopt.api.planning import plan as make_plan
from memopt.demo_models import DemoTask, tasks
from memopt.executor.check import unmetered_bytes
from memopt.models.budget import format_bytes
from memopt.pricing.memory import MemoryUse, metered

if TYPE_CHECKING:
    from rich.table import Table

ROUNDS = 7
"""Rounds of timing; each runs one step of eager and of every plan, so that noise hits all alike."""
FIRST = "sequential"
"""The strategy of the first plan: it solves without compiling anything."""
SHARES = (0.6, 0.3, 0.0)


def _steps(
    task: DemoTask, module: nn.Module, count: int
) -> tuple[list[dict[str, Tensor]], float, int]:
    """Train `count` steps; return (gradients, last loss, peak bytes of the last step)."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    gradients, peak_bytes, value = [], 0, 0.0
    stream = task.batches()
    for number in range(count):
        inputs, target = next(stream)
        torch.manual_seed(number)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        # Metering slows a step down, so only the last one is metered.
        meter = metered(inputs.device) if number == count - 1 else nullcontext(MemoryUse())
        with meter as use:
            output = module(inputs)
            loss = task.loss(output, target)
            loss.backward()  # type: ignore[no-untyped-call]
        peak_bytes = use.peak_bytes
        value = loss.item()
        del output, loss
        gradients.append(
            {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    return gradients, value, peak_bytes


def _times(task: DemoTask, modules: dict[str, nn.Module]) -> dict[str, list[float]]:
    """Time steps of each module in turn, seconds."""
    inputs, target = next(task.batches())
    times: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(ROUNDS):
        for name, module in modules.items():
            module.zero_grad(set_to_none=True)
            begin = time.perf_counter()
            task.loss(module(inputs), target).backward()  # type: ignore[no-untyped-call]
            times[name].append(time.perf_counter() - begin)
    return times


def first_plan(task: DemoTask) -> Plan:
    """Plan the estimated step, before any kernel is measured."""
    inputs, target = next(task.batches())
    return make_plan(
        task.model,
        inputs,
        strategy=FIRST,
        loss_fn=task.loss,
        targets=(target,),
        mode="estimate",
        device="cpu-core",
    )


def plans_of(task: DemoTask, made_one: Callable[[str, Plan], None]) -> dict[str, Plan]:
    """Plan store-all, and auto at floor + {0.6, 0.3, 0}·(baseline − floor); report each plan."""
    inputs, target = next(task.batches())
    whole = make_plan(
        task.model, inputs, strategy="store-all", loss_fn=task.loss, targets=(target,)
    )
    made_one("store-all", whole)
    least = make_plan(whole.profiled, budget="min", progress=False)
    assert least.budget is not None
    plans = {"store-all": whole}
    for share in SHARES:
        budget = least.budget + int(share * (whole.baseline.peak_bytes - least.budget))
        name = f"budget {format_bytes(budget)}"
        plans[name] = make_plan(whole.profiled, budget=budget, progress=False)
        made_one(name, plans[name])
    return plans


def compare(task: DemoTask, plans: dict[str, Plan]) -> Table:
    """Train eagerly and under each plan from the same weights; tabulate the measurements."""
    from rich import box
    from rich.table import Table

    # Without padding eighty columns hold every figure whole.
    table = Table(
        title=task.name, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    table.add_column("", no_wrap=True)
    for title in (
        "predicted peak",
        "measured peak",
        "time / eager",
        "spread",
        "gradient diff",
        "loss",
    ):
        table.add_column(title, justify="right")
    initial = {k: v.clone() for k, v in task.model.state_dict().items()}
    modules: dict[str, nn.Module] = {"eager": task.model}
    modules |= {name: plan.apply(task.model) for name, plan in plans.items()}
    resident = unmetered_bytes(plans["store-all"], torch.device("cpu"))
    results = {}
    for name, module in modules.items():
        task.model.load_state_dict(initial)
        results[name] = _steps(task, module, 3)
    times = _times(task, modules)
    for name, (gradients, loss, peak_bytes) in results.items():
        plan = plans.get(name)
        table.add_row(
            name,
            "" if plan is None else format_bytes(plan.peak_bytes),
            format_bytes(resident + peak_bytes),
            *ratio_and_spread(times[name], times["eager"]),
            "" if plan is None else f"{_difference(results['eager'][0], gradients):g}",
            f"{loss:.4f}",
        )
    task.model.load_state_dict(initial)
    return table


def ratio_and_spread(seconds: list[float], eager: list[float]) -> tuple[str, str]:
    """Format the median of the rounds' ratios, and their range: ("0.95 x", "0.91-1.02")."""
    ratios = sorted(map(truediv, seconds, eager))
    return f"{statistics.median(ratios):.2f} x", f"{ratios[0]:.2f}-{ratios[-1]:.2f}"


def _difference(expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> float:
    """Return the largest difference of any gradient in any step."""
    return max(
        float((one[name] - other[name]).abs().max())
        for one, other in zip(expected, found, strict=True)
        for name in one
    )


def draw(plans: dict[str, dict[str, Plan]], path: Path) -> None:
    """Draw memory over the step at each model's smallest budget, beside the unplanned order."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(plans), 1, figsize=(9, 3.6 * len(plans)), squeeze=False)
    for (name, made), ax in zip(plans.items(), axes[:, 0], strict=True):
        least = list(made.values())[-1]
        least.plot(ax=ax)
        budget = format_bytes(least.budget or 0)
        ax.set_title(f"{name}: {least.strategy.name} at {budget}", loc="left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(path: Path = Path("out/demo.png")) -> None:
    """Run the demo: two tables and one picture."""
    from rich.console import Console

    console = Console()
    drawn: dict[str, dict[str, Plan]] = {}
    begin = time.perf_counter()
    models, missing = tasks()
    for line in missing:
        console.print(line, highlight=False)

    def made_one(name: str, plan: Plan) -> None:
        spent = time.perf_counter() - begin
        peaks = (
            f"{format_bytes(plan.peak_bytes)} of eager's {format_bytes(plan.baseline.peak_bytes)}"
        )
        console.print(f"  {spent:3.0f} s  {name}: {peaks}", highlight=False)

    for number, task in enumerate(models):
        console.print(f"[bold]{task.name}[/bold]: capturing, measuring, planning ...")
        if number == 0:
            made_one(f"{FIRST}, estimated", first_plan(task))
        plans = plans_of(task, made_one)
        console.print(f"  running {ROUNDS} rounds of eager and {len(plans)} plans, in turn ...")
        console.print(compare(task, plans))
        drawn[task.name] = plans
    try:
        draw(drawn, path)
        picture = f"Picture: {path}"
    except ImportError:
        picture = "No picture: it needs matplotlib (pip install matplotlib)"
    seconds = time.perf_counter() - begin
    console.print(
        f"Totals include parameters. 'time / eager' is the median of {ROUNDS} interleaved rounds, "
        f"'spread' their range. 'gradient diff' is the largest difference from eager over three "
        f"optimizer steps. {picture} ({seconds:.0f} s in all)"
    )


if __name__ == "__main__":
    main()
