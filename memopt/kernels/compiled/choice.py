"""Chooses which regions run as compiled kernels: all, the faster ones, or those of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.kernels.compiled.channels_last import in_channels_last, is_of_images
from memopt.kernels.compiled.fuse import Found, fused, kernel_of
from memopt.kernels.compiled.losses import with_parts
from memopt.kernels.tiled.fuse import without_choice
from memopt.models.progress import Progress
from memopt.models.record import KERNELS, ModelRecord
from memopt.pricing.measure import MeasureOptions, costs_of, silent
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.fused import Fused
from memopt.step.region_graph import Subgraph
from memopt.step.signature import Signature, signature

Fuse = Callable[[nn.Module, Captured, Lowering], Fused]
"""A function that gives a captured step its kernels."""


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
    """Return the function that gives a step the kernels of `memopt.plan(kernels=...)`."""

    def fuse(model: nn.Module, captured: Captured, lowering: Lowering) -> Fused:
        plain = without_choice(kernels, model, captured, lowering, block_bytes)
        if plain is not None:
            return plain[0]
        lowering = with_parts(model, captured, lowering, block_bytes)
        rows = _of_images(lowering)
        images = in_channels_last(captured)
        if images is not None:
            last = build(model, images.captured, block_bytes)
            timed = partial(_total_s, device=device, options=options, progress=progress)
            if timed(_of_images(last)) < timed(rows):
                captured, lowering = images.captured, last
            else:
                images.undo()
                images = None
        measured = partial(_slower, lowering, device, options, progress)
        made = fused(
            model,
            captured,
            lowering,
            device,
            kernels=kernels,
            slower=measured if kernels == "auto" else lambda _found: set(),
            block_bytes=block_bytes,
            progress=progress,
        )
        return replace(made, channels_last=images is not None)

    return fuse


def planned_kernels(record: ModelRecord | None, device: torch.device, block_bytes: int) -> Fuse:
    """Return the function that gives a step captured anew the kernels of a plan."""

    def fuse(model: nn.Module, captured: Captured, lowering: Lowering) -> Fused:
        if record is None:
            return Fused(captured, lowering)
        plain = without_choice(record.kernels, model, captured, lowering, block_bytes)
        if plain is not None:
            return plain[0]
        lowering = with_parts(model, captured, lowering, block_bytes)
        if record.channels_last:
            images = in_channels_last(captured)
            if images is not None:
                captured, lowering = images.captured, build(model, images.captured, block_bytes)
        return fused(
            model,
            captured,
            lowering,
            device,
            kernels=record.kernels,
            aten=record.aten_regions,
            block_bytes=block_bytes,
        )

    return fuse


def _of_images(lowering: Lowering) -> list[Signature]:
    """Return the calls that convolve images, or copy one into another order."""
    calls = zip(lowering.nodes, lowering.signatures, strict=True)
    return [call for node, call in calls if is_of_images(node)]


def _total_s(
    calls: list[Signature], device: torch.device, options: MeasureOptions, progress: Progress
) -> float:
    """Measure the seconds that calls take in all."""
    return sum(cost.time_s for cost in costs_of(calls, device, options, progress))


def _slower(
    lowering: Lowering,
    device: torch.device,
    options: MeasureOptions,
    progress: Progress,
    found: Found,
) -> set[str]:
    """Measure the regions, and return the keys of those that ATen's kernels run faster. Regions
    with a dropout are left out: ATen draws its numbers one by one, which is slower."""
    distinct = {one.key: (region, one) for region, one in found if not one.dropouts}
    calls = dict.fromkeys(op for region, _ in distinct.values() for op in region.operators)
    costs = costs_of([lowering.signatures[op] for op in calls], device, options, progress)
    aten_s = {op: cost.time_s for op, cost in zip(calls, costs, strict=True)}
    calls_alone = [signature(_call(one, device)) for _, one in distinct.values()]
    kernels = zip(distinct, costs_of(calls_alone, device, options, progress), strict=True)
    return {
        key
        for key, cost in kernels
        if cost.time_s > sum(aten_s[op] for op in distinct[key][0].operators)
    }


def _call(one: Subgraph, device: torch.device) -> Node:
    """Return a region's kernel as a call of its own, to be measured."""
    graph = FxGraph()
    inputs = []
    for node in one.graph.find_nodes(op="placeholder"):
        inputs.append(graph.placeholder(node.name))
        inputs[-1].meta["val"] = node.meta["val"]
    call = graph.create_node("call_function", kernel_of(one, device), tuple(inputs), name="fused")
    call.meta["val"] = one.values
    return call
