"""Pipelines whose stages are planned."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from benchmarks.engine_models import (
    MICRO_BATCHES,
    STEPS,
    TOKENS,
    VOCABULARY,
    Decoder,
    Ran,
    Wrap,
    loss_of,
    stepped,
)
from memopt.pricing.memory import MemoryUse, metered


def pipelined(
    model: Decoder, ranks: int, wrap: Wrap, schedule: Any, own: tuple[int, ...], stages: int
) -> Ran:
    """Train under a pipeline's schedule.

    Args:
        model: the whole.
        ranks: how many.
        wrap: plans a stage's module.
        schedule: a class of torch's; of one stage a rank, or of several.
        own: the stages of this rank.
        stages: how many there are.

    Returns:
        The micro-batches' losses, on the last stage's rank, and norms; this rank's parameters; the
        most bytes of a step, but for gradients and what a pipeline's plans hold as long.
    """
    layers = [model.embedding, *model.blocks, nn.Sequential(model.norm, model.head)]
    size = len(layers) // stages
    modules = {i: wrap(nn.Sequential(*layers[size * i :][:size])) for i in own}
    made = [PipelineStage(modules[i], i, stages, torch.device("cpu")) for i in own]
    several = issubclass(schedule, PipelineScheduleMulti)
    running = schedule(made if several else made[0], 2 * MICRO_BATCHES, loss_fn=loss_of)
    parameters = [one for module in modules.values() for one in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-2, foreach=False)
    torch.manual_seed(100)
    found: list[float] = []
    peak_bytes = 0
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (4 * MICRO_BATCHES, TOKENS))
        losses: list[Tensor] = []
        last = {"target": tokens, "losses": losses} if stages - 1 in own else {}
        plain = contextlib.nullcontext(MemoryUse())
        meter: Any = metered(torch.device("cpu")) if step >= STEPS - 3 else plain
        with meter as use:
            running.step(*([tokens] if 0 in own else []), **last)
        peak_bytes = max(peak_bytes, use.peak_bytes)
        gradients = [one.grad for one in parameters if one.grad is not None]
        norm = torch.stack([one.square().sum() for one in gradients]).sum()
        torch.distributed.all_reduce(norm)
        found += [one.item() for one in losses] + [stepped(optimizer, norm.sqrt())]
    # Gradients, losses and the gradient that is being sent are resident for a plan.
    received = [info.buffer for one in made for info in one.args_recv_info[0]]
    resident = [*parameters, *losses, *(one for one in received if one is not None)]
    peak_bytes -= sum(one.nbytes for one in resident)
    return found, [one.detach() for one in parameters], peak_bytes


SCHEDULES: dict[str, tuple[Any, int, bool]] = {
    "pipeline, 1F1B": (Schedule1F1B, 1, False),
    "pipeline, interleaved 1F1B": (ScheduleInterleaved1F1B, 2, False),
    "pipeline, zero bubble": (ScheduleInterleavedZeroBubble, 2, False),
    "pipeline, ZBV": (ScheduleZBVZeroBubble, 2, True),
}
"""Schedule → (its class, stages of a rank, whether a rank's second is counted from the end)."""
