"""Which regions run as compiled kernels: all, those that are faster, or those of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.profiler.build import Lowering
from memopt.profiler.capture import Captured
from memopt.profiler.compiled.divide import Region
from memopt.profiler.compiled.fuse import Fused, Progress, fused, kernel_of, keys_of
from memopt.profiler.compiled.subgraph import Subgraph
from memopt.profiler.measure import MeasureOptions, costs_of, silent

KERNELS = ("aten", "compiled", "auto")
"""What `kernels=` may be."""

Fuse = Callable[[nn.Module, Captured, Lowering], Fused]
"""Gives a captured step its kernels."""


def check_kernels(kernels: str) -> None:
    """Refuse an unknown choice.

    Raises:
        ValueError: it is none of KERNELS.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels= is one of {', '.join(map(repr, KERNELS))}, got {kernels!r}")


def chosen_kernels(
    kernels: str,
    device: torch.device,
    options: MeasureOptions,
    block_bytes: int,
    progress: Progress = silent,
) -> Fuse:
    """What gives a step the kernels that `memopt.plan(kernels=...)` asks for.

    Args:
        kernels: one of KERNELS. "auto" measures each region, both ways.
        device: where the step runs.
        options: how hard to measure.
        block_bytes: the allocator's granularity.
        progress: called with (fraction, what).
    """

    def fuse(model: nn.Module, captured: Captured, lowering: Lowering) -> Fused:
        if kernels == "aten":
            return Fused(captured, lowering)
        keep = partial(_faster, lowering, device, options, progress) if kernels == "auto" else None
        return fused(
            model,
            captured,
            lowering,
            device,
            kernels=kernels,
            keep=keep,
            block_bytes=block_bytes,
            progress=progress,
        )

    return fuse


def planned_kernels(targets: Iterable[str], device: torch.device, block_bytes: int) -> Fuse:
    """What gives a step that is captured anew the compiled kernels of a plan.

    Args:
        targets: of the plan's operators.
        device: where the step runs.
        block_bytes: the allocator's granularity in the plan's graph.
    """
    keys = keys_of(targets)

    def fuse(model: nn.Module, captured: Captured, lowering: Lowering) -> Fused:
        if not keys:
            return Fused(captured, lowering)
        return fused(model, captured, lowering, device, only=keys, block_bytes=block_bytes)

    return fuse


def _faster(
    lowering: Lowering,
    device: torch.device,
    options: MeasureOptions,
    progress: Progress,
    found: list[tuple[Region, Subgraph]],
) -> list[bool]:
    """Of each region whether its kernel takes less time than ATen's kernels do, measured."""
    calls = dict.fromkeys(op for region, _ in found for op in region.operators)
    costs = costs_of([lowering.nodes[op] for op in calls], device, options, progress)
    aten_s = {op: cost.time_s for op, cost in zip(calls, costs, strict=True)}
    distinct = {one.key: (region, one) for region, one in found}
    nodes = [_call(one, device) for _, one in distinct.values()]
    kernel_s = {
        key: cost.time_s
        for key, cost in zip(distinct, costs_of(nodes, device, options, progress), strict=True)
    }
    kept = {
        key: kernel_s[key] < sum(aten_s[op] for op in region.operators)
        or bool(one.dropouts)  # ATen draws the numbers one by one.
        for key, (region, one) in distinct.items()
    }
    return [kept[one.key] for _, one in found]


def _call(one: Subgraph, device: torch.device) -> Node:
    """A region's kernel as a call of its own, to be measured."""
    graph = FxGraph()
    inputs = []
    for node in one.graph.find_nodes(op="placeholder"):
        inputs.append(graph.placeholder(node.name))
        inputs[-1].meta["val"] = node.meta["val"]
    call = graph.create_node("call_function", kernel_of(one, device), tuple(inputs), name="fused")
    call.meta["val"] = tuple(node.meta["val"] for node in one.outputs)
    return call
