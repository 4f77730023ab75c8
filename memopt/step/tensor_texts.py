"""Formats dtypes and shapes of a graph's tensors for people."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.step.build import Lowering


def tensor_texts(lowering: Lowering) -> Mapping[int, str]:
    """Map tensors → dtype and shape, "float32 [8, 512, 768]", where the captured graph has them."""
    values = {tensor: base.meta.get("val") for tensor, base in lowering.bases.items()}
    return {
        tensor: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for tensor, value in values.items()
        if isinstance(value, torch.Tensor)
    }
