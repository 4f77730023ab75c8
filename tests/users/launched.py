"""Hugging Face's Trainer and a loop of accelerate's, in processes that torchrun starts: without
memopt, then with it. Writes each rank's losses and weights to the folder that it is given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.zoo import torchvision_shim  # noqa: F401  # before transformers

# isort: split
import transformers
from accelerate import Accelerator

import memopt
from memopt.integrations.hugging_face import MemoptCallback
from tests.users.test_hugging_face import TASKS, Watch

STEPS = 4
TASK = TASKS["bert"]


def trainer(folder: Path, planned: bool) -> list[Any]:
    """Train by the Trainer; return losses, weights and the number of planned calls."""
    callback, watch, model = MemoptCallback("min", improve=False), Watch(), TASK.model()
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=TASK.examples(32),
        data_collator=TASK.batch,
        callbacks=[watch, *([callback] if planned else [])],
    ).train()
    return [[loss for _, loss in watch.losses], model.state_dict(), callback.calls.planned]


def loop(folder: Path, planned: bool) -> list[Any]:
    """Train by accelerate's loop; return losses, weights and the number of planned calls."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = TASK.model().train()
    if planned:
        memopt.wrap(plain, "min", improve=False, progress=False)
    batches: Any = torch.utils.data.DataLoader(TASK.examples(16), 2, collate_fn=TASK.batch)
    model, optimizer, batches = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), 1e-3), batches
    )
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, plain.state_dict(), memopt.running(plain).calls.planned if planned else 0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for kind in (trainer, loop):
        for planned in (False, True):
            transformers.set_seed(1)
            found[kind.__name__, planned] = kind(Path(sys.argv[1]), planned)
    torch.save(found, Path(sys.argv[1]) / f"{torch.distributed.get_rank()}.pt")
