"""Charges what is resident besides a module's step: gradients that exist when it begins (gradient
accumulation, or gradients zeroed and kept), and what the training loop holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from memopt.models.budget import format_bytes
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.device import in_blocks
from memopt.programs.charged import needed_bytes, with_charges
from memopt.programs.liveness import store_all
from memopt.step.profiled import Profiled


def accumulating(profiled: Profiled | None, *, whole_step: bool) -> Profiled:
    """Charge the gradients of all parameters from the step's beginning: autograd adds the step's
    gradients to them, without further memory. Charge also the gradients that other parameters hold
    now (frozen ones, say, of a GAN's discriminator).

    Raises:
        ValueError: the step is not a module's, or it updates parameters.
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
        # A DTensor's gradient may be whole on each rank where it is cut.
        if isinstance(value := (gradient if primal.part else primal.node).meta["val"], torch.Tensor)
    }
    model = captured.model()
    others = dict(nn.Module.named_parameters(model)) if model is not None else {}
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


def charged(profiled: Profiled | None, charges: Charges) -> Profiled | None:
    """Charge what a training loop was seen to need besides the step. What lives during the forward
    alone is no part of a graph; planning leaves room for it."""
    if profiled is None or profiled.record is None or not charges:
        return profiled
    graph = with_charges(profiled.graph, charges)
    unplanned = store_all(graph)
    more_bytes = needed_bytes(graph, unplanned, charges.beyond(charges)) - needed_bytes(
        profiled.graph, unplanned, NO_CHARGES
    )
    record, baseline = profiled.record, profiled.baseline
    notes = tuple(f"Charged as met in the training loop: {one}." for one in charges.listed())
    return replace(
        profiled,
        graph=graph,
        baseline=replace(baseline, peak_bytes=baseline.peak_bytes + more_bytes),
        record=replace(
            record,
            loss_bytes=record.loss_bytes + charges.kept_bytes,
            dropped_bytes=charges.held_bytes,
        ),
        notes=(*notes, *profiled.notes),
    )
