"""What popular architectures are called with, and losses of their outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY = 128

Inputs = dict[str, Any]


def tokens(labels: str = "tokens") -> Inputs:
    """Padded texts, with a label for each token or for each text."""
    ids = torch.randint(3, VOCABULARY, (2, 16))
    mask = torch.ones_like(ids)
    mask[-1, -4:] = 0
    wanted = ids.masked_fill(mask == 0, -100) if labels == "tokens" else torch.randint(2, (2,))
    return {"input_ids": ids, "attention_mask": mask, "labels": wanted}


def replaced_tokens() -> Inputs:
    """What ELECTRA discriminates: for each token, whether it was replaced."""
    return tokens() | {"labels": torch.randint(2, (2, 16))}


def pictures() -> Inputs:
    """Images, each with its class."""
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(2, (2,))}


def segmented() -> Inputs:
    """Images, with the class of each of their pixels."""
    return {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "labels": torch.randint(2, (2, 64, 64)),
    }


def waves() -> Inputs:
    """Sounds, with the tokens that are spoken."""
    return {"input_values": torch.randn(2, 4000), "labels": torch.randint(1, 32, (2, 4))}


def spectra() -> Inputs:
    """Spectrograms, with the tokens that are spoken."""
    return {
        "input_features": torch.randn(2, 80, 64),
        "labels": torch.randint(3, VOCABULARY, (2, 8)),
    }


def captioned() -> Inputs:
    """Images with texts."""
    return without_labels(tokens()) | without_labels(pictures()) | {"return_loss": True}


def without_labels(inputs: Inputs) -> Inputs:
    """The inputs of a model whose loss is computed outside."""
    return {name: value for name, value in inputs.items() if name != "labels"}


def class_loss(output: Tensor) -> Tensor:
    """Cross entropy with random classes."""
    return functional.cross_entropy(output, torch.randint(output.shape[-1], output.shape[:1]))


def replaced_loss(output: Any) -> Tensor:
    """ELECTRA's loss, of texts as `tokens` pads them."""
    logits = output.logits
    losses = functional.binary_cross_entropy_with_logits(
        logits, torch.randint(2, logits.shape).float(), reduction="none"
    )
    kept = tokens()["attention_mask"]
    return (losses * kept).sum() / kept.sum()


def spoken_loss(output: Any) -> Tensor:
    """Wav2Vec2's loss, of texts of four tokens."""
    steps = output.logits.log_softmax(-1).transpose(0, 1)
    spoken = torch.randint(1, 32, (2, 4))
    lengths = torch.full((2,), len(steps)), torch.full((2,), 4)
    return functional.ctc_loss(steps, spoken, *lengths)
