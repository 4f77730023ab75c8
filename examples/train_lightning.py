"""Lightning under a budget: digits, with validation, accumulation and clipping.

python -m examples.train_lightning
"""

from __future__ import annotations

from typing import Any

from tests.zoo import torchvision_shim  # isort: skip  # noqa: F401  # beside a CPU torch

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memopt.integrations.lightning import MemoptCallback


class Digits(lightning.LightningModule):
    """A classifier of digits."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
        self.network = nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(self.network(images), targets)

    def validation_step(self, batch: Any, index: int) -> None:
        images, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.network(images), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(steps: int = 20) -> MemoptCallback:
    """Train; the callback, which says how the steps ran."""
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1)
    batches = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=128)
    memopt = MemoptCallback("min")
    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[memopt],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), batches, batches)
    print(memopt.calls)
    return memopt


if __name__ == "__main__":
    main()
