"""Loops of others for the small decoders: Hugging Face's and Lightning's
trainers, and torch's pipelines, whose stages are planned."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from memopt.pricing.memory import MemoryUse, metered
from tests.distributed import cases
from tests.distributed import decoders as small
from tests.distributed.decoders import MICRO_BATCHES, STEPS, TOKENS, VOCABULARY, loss_of

ROWS = 2
Trained = tuple[list[float], list[Tensor], Any]
"""What was logged, this rank's parts of the parameters, and the counts of planned calls."""


def _texts(ranks: int) -> Tensor:
    random = torch.Generator().manual_seed(3)
    rows = STEPS * MICRO_BATCHES * ROWS * ranks
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=random)


class WithLoss(nn.Module):
    """A decoder as Hugging Face's Trainer calls it."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.decoder(input_ids)
        return {"loss": loss_of(logits, labels), "logits": logits}


def by_hugging_face(decoder: nn.Module, ranks: int, planned: bool, fsdp: bool) -> Trained:
    """Train by Hugging Face's Trainer, under DistributedDataParallel or FSDP2."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

    from accelerate.state import AcceleratorState  # isort: skip

    from memopt.integrations.hugging_face import MemoptCallback  # isort: skip

    cases.launched(ranks)
    AcceleratorState._reset_state(reset_partial_state=True)
    model, callback = WithLoss(decoder), MemoptCallback("min", "rotor")
    steps = {"max_steps": STEPS, "per_device_train_batch_size": ROWS}
    steps["gradient_accumulation_steps"] = MICRO_BATCHES
    chosen = [callback] if planned else []
    with tempfile.TemporaryDirectory() as folder:
        found = cases.by_trainer(model, _texts(ranks), folder, chosen, "Block", fsdp=fsdp, **steps)
    return *found, callback.calls


def by_lightning(decoder: nn.Module, ranks: int, planned: bool, fsdp: bool) -> Trained:
    """Train by Lightning's Trainer, under DistributedDataParallel or FSDP2."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before lightning)

    import lightning  # isort: skip
    from lightning.pytorch.strategies import ModelParallelStrategy  # isort: skip

    from memopt.integrations.lightning import MemoptCallback  # isort: skip

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network: Any = decoder
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if fsdp:
                small.blockwise(self.network, self.device_mesh["data_parallel"])

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss = loss_of(self.network(tokens), tokens)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    cases.launched(ranks)
    module, callback = Module(), MemoptCallback("min", "rotor")
    strategy = ModelParallelStrategy(ranks, 1) if fsdp else "ddp"
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_steps=STEPS,
            accumulate_grad_batches=MICRO_BATCHES,
            gradient_clip_val=0.5,
            callbacks=[callback] if planned else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, torch.utils.data.DataLoader(_texts(ranks), batch_size=ROWS))
    return module.losses, cases.own(module), callback.calls


TRAINERS: dict[str, tuple[Callable[[nn.Module, int, bool, bool], Trained], bool]] = {
    "Hugging Face Trainer, DDP": (by_hugging_face, False),
    "Hugging Face Trainer, FSDP2": (by_hugging_face, True),
    "Lightning Trainer, DDP": (by_lightning, False),
    "Lightning Trainer, FSDP2": (by_lightning, True),
}
"""Trainer → how to train with it, and whether under FSDP2."""


def pipelined(
    model: small.Decoder, wrap: small.Wrap, schedule: Any, own: tuple[int, ...], stages: int
) -> small.Ran:
    """Train under a pipeline's schedule.

    Args:
        wrap: plans a stage's module.
        schedule: a class of torch's; of one stage a rank, or of several.
        own, stages: the stages of this rank, and how many there are.

    Returns:
        The micro-batches' losses, on the last stage's rank, and norms; this rank's parameters; the
        most bytes of a step, but for gradients and what a pipeline's plans hold as long.
    """
    layers = [model.embedding, *model.blocks, nn.Sequential(model.norm, model.head)]
    size = len(layers) // stages
    modules = {i: wrap(nn.Sequential(*layers[size * i :][:size])) for i in own}
    made = [pipelining.PipelineStage(modules[i], i, stages, torch.device("cpu")) for i in own]
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
        found += [one.item() for one in losses] + [small.stepped(optimizer, norm.sqrt())]
    # Gradients, losses and the gradient that is being sent are resident for a plan.
    received = [info.buffer for one in made for info in one.args_recv_info[0]]
    resident = [*parameters, *losses, *(one for one in received if one is not None)]
    peak_bytes -= sum(one.nbytes for one in resident)
    return found, [one.detach() for one in parameters], peak_bytes


SCHEDULES: dict[str, tuple[Any, int, bool]] = {
    "pipeline, 1F1B": (pipelining.Schedule1F1B, 1, False),
    "pipeline, interleaved 1F1B": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "pipeline, zero bubble": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "pipeline, ZBV": (pipelining.ScheduleZBVZeroBubble, 2, True),
}
"""Schedule → (its class, stages of a rank, whether a rank's second is counted from the end)."""
