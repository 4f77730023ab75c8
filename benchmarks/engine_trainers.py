"""The small decoders of `benchmarks.engines` under trainers: Hugging Face's and Lightning's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.engine_models import MICRO_BATCHES, STEPS, TOKENS, VOCABULARY, loss_of
from tests.distributed import cases

ROWS = 2
Trained = tuple[list[float], list[Tensor], Any]
"""What was logged, this rank's parts of the parameters, and the counts of planned calls."""


def _texts(ranks: int) -> Tensor:
    """Texts for all steps of all ranks."""
    random = torch.Generator().manual_seed(3)
    rows = STEPS * MICRO_BATCHES * ROWS * ranks
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=random)


class WithLoss(nn.Module):
    """A decoder as Hugging Face's Trainer calls it."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
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
                assert self.device_mesh is not None
                mesh = self.device_mesh["data_parallel"]
                for block in self.network.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.network, mesh=mesh)

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
        trainer.fit(module, torch.utils.data.DataLoader(_texts(ranks), batch_size=ROWS))  # type: ignore[arg-type]
    return module.losses, cases.own(module), callback.calls


TRAINERS: dict[str, tuple[Callable[[nn.Module, int, bool, bool], Trained], bool]] = {
    "Hugging Face Trainer, DDP": (by_hugging_face, False),
    "Hugging Face Trainer, FSDP2": (by_hugging_face, True),
    "Lightning Trainer, DDP": (by_lightning, False),
    "Lightning Trainer, FSDP2": (by_lightning, True),
}
"""Trainer → how to train with it, and whether under FSDP2."""
