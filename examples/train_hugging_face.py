"""Hugging Face's Trainer under a budget: a small GPT-2 learns the licence of Python.

python -m examples.train_hugging_face
"""

from __future__ import annotations

import tempfile
from typing import Any

from tests.zoo import torchvision_shim  # isort: skip  # noqa: F401  # beside a CPU torch

import site
from pathlib import Path

import torch
import transformers

from memopt.integrations.hugging_face import MemoptCallback


def texts(length: int = 64) -> list[dict[str, Any]]:
    """Pieces of a text that every Python has, a byte a token."""
    source = Path(site.__file__)
    ids = torch.tensor(list(source.read_bytes()))
    pieces = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(steps: int = 20) -> MemoptCallback:
    """Train; the callback, which says how the steps ran."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_layer=4, n_embd=128, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    memopt = MemoptCallback("min")
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            logging_steps=5,
            report_to=[],
        )
        trainer = transformers.Trainer(
            model=model, args=settings, train_dataset=texts(), callbacks=[memopt]
        )
        trainer.train()
    print(memopt.calls)
    return memopt


if __name__ == "__main__":
    main()
