"""Gradients that are there when a step begins: gradient accumulation, or zeroed ones kept."""

from __future__ import annotations

from dataclasses import replace

import torch

from memopt.models.budget import format_bytes
from memopt.models.device import in_blocks
from memopt.profiler.session import Profiled


def accumulating(profiled: Profiled | None, *, whole_step: bool) -> Profiled:
    """The step with the gradients of all its parameters charged from its beginning: autograd adds
    to them what the step's backward makes, without further memory. And with those that other
    parameters of the model hold now (frozen ones, say, of a GAN's discriminator).

    Raises:
        ValueError: it is no step of a module, or one that updates parameters.
    """
    if profiled is None or whole_step or profiled.record is None:
        raise ValueError(
            "accumulate=True is for steps of a module whose gradients stay: pass the module, and "
            "leave out what makes it a whole step, whose gradients end in its updates "
            "(whole_step=True, movable=, offload_optimizer=, micro_batches=, clip_norm=, scaler=)"
        )
    captured, block_bytes = profiled.captured, profiled.record.block_bytes
    made = {
        primal.name: value
        for primal, gradient in zip(captured.primals, captured.gradients, strict=True)
        if primal.kind == "parameter" and gradient is not None
        if isinstance(value := primal.node.meta["val"], torch.Tensor)
    }
    model = captured.model()
    others = dict(model.named_parameters()) if model is not None else {}
    held = [p.grad for name, p in others.items() if name not in made and p.grad is not None]
    held_bytes = sum(
        in_blocks(value.numel() * value.element_size(), block_bytes)
        for value in (*made.values(), *held)
    )
    graph, baseline = profiled.graph, profiled.baseline
    resident_bytes = graph.extra_resident_bytes + held_bytes
    return replace(
        profiled,
        graph=replace(graph, extra_resident_bytes=resident_bytes),
        baseline=replace(baseline, peak_bytes=baseline.peak_bytes + held_bytes),
        record=replace(profiled.record, accumulated_bytes=held_bytes),
        notes=(
            f"Resident: {format_bytes(held_bytes)} of gradients that are there when a step begins.",
            *profiled.notes,
        ),
    )
