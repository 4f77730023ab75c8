"""The loss that a Hugging Face model computes itself, if it is given its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memopt.step.inputs import Call

_ASK_FOR_LOSS = (
    "labels",
    "start_positions",
    "next_sentence_label",
    "sentence_order_label",
    "mask_labels",
    "future_values",
    "target_values",
    "return_loss",
)
"""Arguments with which Hugging Face's models compute their own loss: targets, or that it is wanted
(CLIP's kin)."""


class NoLossError(ValueError):
    """A model that is called with labels, or asked for its loss, returns none."""


def own_loss(output: Any) -> Any:
    """Return the loss that a Hugging Face model computes itself from its labels: the `loss` of its
    output or of the dict that it returns, or the first item of a tuple.

    Raises:
        NoLossError: the output has none.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise NoLossError("the model is called with labels and returns no loss: pass loss_fn=")
    return loss


def loss_arguments(call: Call) -> list[str]:
    """Return the names of the arguments of a call that let the model compute its own loss."""
    given = ((name, call.kwargs.get(name)) for name in _ASK_FOR_LOSS)
    return [name for name, value in given if value is not None and value is not False]


def has_own_loss(call: Call) -> bool:
    """Return whether a call lets the model compute its own loss."""
    return bool(loss_arguments(call))
