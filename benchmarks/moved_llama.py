"""Llama shapes whose parameters and AdamW state do not fit, estimated: docs/results/moved_llama.md.

    python -m benchmarks.moved_llama [8b 70b] [--limit 50] [--layers N] [--out FILE.md]

bfloat16 parameters and gradients, two float32 moments, tokens in sequences of 2,048. The step is
captured on fake tensors and priced for the device; an update is priced by the bytes that it reads
and writes, on the device or, at the host's rate, on the host. `joint` plans it with
`movable="all"`, with updates on the host and without, once as a step that ends with everything on
the host and once as one that is repeated (`steady_state=True`). The bound is `link_bound_s`, which
holds for every program of the step; without updates on the host it is in closed form.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from benchmarks.llamas import llama
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import Budget, format_bytes
from memopt.models.device import Device, in_blocks
from memopt.models.graph import Graph, Implementation, Operator, Phase
from memopt.models.presets import GH200, H100
from memopt.profiler.baseline import Loss
from memopt.profiler.estimate import estimate_model
from memopt.profiler.host_updates import ON_HOST, with_choices
from memopt.profiler.movable import movable_graph
from memopt.profiler.session import Profiled
from memopt.programs.moved import carried_over
from memopt.programs.replay import Direction, replay
from memopt.programs.validate import validate
from memopt.strategies.joint.strategy import Joint
from memopt.strategies.moving.bound import link_bound_s
from memopt.strategies.moving.on_host import without_host_updates
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

STATE_BYTES = 8
"""Of AdamW's two float32 moments, for each element."""
BATCHES = {"8b": 8, "70b": 4}
"""Shape of Llama 3 → sequences of 2,048 tokens."""
LENGTH = 2048


def language_model(name: str, layers: int | None = None) -> tuple[Any, Any]:
    """The model on meta, with all its layers or some, and its inputs."""
    with torch.device("meta"):
        model = llama(f"llama-3-{name}", layers=layers).to(torch.bfloat16)
        tokens = torch.zeros(BATCHES[name], LENGTH, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def loss_of(output: Any) -> Any:
    """The model's own loss."""
    return output.loss


def whole_step(profiled: Profiled, device: Device) -> Graph:
    """The estimated step with an update of every parameter, its state movable."""
    graph, lowering = profiled.graph, profiled.lowering
    operators, states, parameters = list(graph.operators), dict[str, int](), list[int]()
    results: set[int] = set()
    rate = device.memory_bytes_per_s * device.memory_fraction
    pairs = zip(profiled.captured.primals, profiled.captured.gradients, strict=True)
    for primal, gradient in pairs:
        if primal.kind != "parameter" or not isinstance(gradient, Node):
            continue
        tensor, made = lowering.storages[primal.node][0], lowering.storages[gradient][0]
        assert tensor is not None
        assert made is not None
        size, elements = graph.tensors[tensor].size_bytes, primal.node.meta["val"].numel()
        states[primal.name] = in_blocks(STATE_BYTES * elements, device.block_bytes)
        moved_bytes = 3 * size + 2 * states[primal.name]
        operators.append(
            Operator(
                f"update.{primal.name}",
                (made, tensor),
                (),
                moved_bytes / rate + device.launch_latency_s,
                phase=Phase.UPDATE,
                recomputable=False,
            )
        )
        results.add(made)
        parameters.append(tensor)
    step = replace(
        graph,
        operators=tuple(operators),
        gradients=tuple(t for t in graph.gradients if t not in results),
    )
    graph = movable_graph(step, tuple(sorted(parameters)), states, charged=False)
    return with_choices(graph, _on_host(graph, device))


def _on_host(graph: Graph, device: Device) -> dict[str, Implementation]:
    """The same updates by the host."""
    rate, found = device.host_update_bytes_per_s, {}
    assert rate is not None
    for operator in graph.operators:
        if operator.phase is Phase.UPDATE:
            sizes = {t: graph.tensors[t].size_bytes for t in operator.reads}
            held = sum(size for t, size in sizes.items() if t in graph.resident)
            time_s = (sum(sizes.values()) + held) / rate
            found[operator.name] = Implementation(
                ON_HOST, time_s, 0, (), (), exact=False, on_host=True
            )
    return found


def row(name: str, graph: Graph, device: Device, limit_s: float) -> str:
    """One line of the table."""
    budget = device.capacity_bytes
    assert budget is not None
    began = time.perf_counter(), time.process_time()
    found = Joint(exact_only=False).solve(graph, budget, device=device, time_limit_s=limit_s)
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    tokens = BATCHES[name] * LENGTH
    if found.program is None:
        least = format_bytes(found.smallest_budget_bytes or 0)
        return f"| {name} | {device.name} | no plan; the smallest budget known is {least} |"
    violation = validate(graph, found.program, Budget(budget))
    assert violation is None, violation
    timeline = replay(graph, found.program, device)
    busy = dict.fromkeys(Direction, 0.0)
    for one in timeline.transfers:
        busy[one.direction] += one.end_s - one.start_s
    computing_s = timeline.time_s - timeline.total_stall_s
    binds = {
        "compute": computing_s,
        "link from host": busy[Direction.FROM_HOST],
        "link to host": busy[Direction.TO_HOST],
        "host": sum(one.end_s - one.start_s for one in timeline.host_updates),
    }
    bound_s = link_bound_s(graph, budget, device)
    closed_s = link_bound_s(without_host_updates(graph), budget, device)
    shares = ", ".join(f"{what} {busy_s / timeline.time_s:.0%}" for what, busy_s in binds.items())
    left = carried_over(graph, found.program)
    cells = (
        f"{name}, repeated" if graph.repeated else name,
        device.name,
        f"{tokens:,}",
        format_bytes(graph.movable_bytes),
        f"**{timeline.time_s:.2f}**",
        f"{tokens / timeline.time_s:,.0f}",
        f"{bound_s:.2f}",
        f"{closed_s:.2f}",
        f"{timeline.time_s / bound_s:.2f}",
        f"{time_lower_bound(graph):.2f}",
        f"**{max(binds, key=lambda what: binds[what])}** ({shares})",
        format_bytes(timeline.host_peak_bytes),
        format_bytes(sum(graph.tensors[t].size_bytes for t in left)) if left else "-",
        str(found.stats.get("source")),
        f"{wall_s:.0f} / {cpu_s:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "# Llama shapes that do not fit, estimated\n\n"
    "`{command}`: bfloat16 parameters, two float32 moments of AdamW, sequences of 2,048 tokens, "
    "`joint` with everything movable, every update on the device or on the host. H100: {h100}. "
    "GH200: {gh200}. Nothing was run on either.\n\n"
    "Bounds are `link_bound_s` of `memopt/strategies/moving/bound.py` and hold for every program "
    "of the step: with updates wherever they are best (a linear program over the host's shares), "
    "and in closed form with all of them on the device, which the plan may beat. *compute* is "
    "every operator once. Shares say how much of the step each stream is busy. A GH200 has 480 GB "
    "of host memory at most: what needs more (*host memory*) would not fit beside one. *repeated*: "
    "planned with `steady_state=True`; the time is from one step to the next.\n\n"
)
COLUMNS = (
    "shape",
    "device",
    "tokens",
    "parameters and state",
    "step s",
    "tokens/s",
    "bound s",
    "link bound s, updates on the device",
    "step / bound",
    "compute s",
    "busiest",
    "host memory",
    "stays between steps",
    "made from",
    "planning s (wall / CPU)",
)


def main(arguments: Iterable[str]) -> None:
    """Plan what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(BATCHES))
    parser.add_argument("--limit", type=float, default=50.0, help="seconds of planning")
    parser.add_argument("--layers", type=int, help="so many layers only, for a quick look")
    parser.add_argument("--device", default="", help="on this one only, by its name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args([*arguments])
    sources = {"h100": H100.source, "gh200": GH200.source}
    command = "python -m benchmarks.moved_llama --out docs/results/moved_llama.md"
    text = HEAD.format(command=command, **sources)
    text += "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    for name in options.shapes or BATCHES:
        for device in (H100, GH200):
            if options.device not in ("", device.name):
                continue
            model, inputs = language_model(name, options.layers)
            began = time.perf_counter()
            profiled = estimate_model(model, inputs, device, loss=Loss(loss_of))
            graph = whole_step(profiled, device)
            size = len(graph.operators)
            print(f"{name}: {size} operators in {time.perf_counter() - began:.0f} s", flush=True)
            for repeated in (False, True):
                line = row(name, replace(graph, repeated=repeated), device, options.limit)
                print(line, flush=True)
                text += line + "\n"
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
