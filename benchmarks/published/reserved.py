"""What torch's allocator reserves beside a step's own tensors, as a published row was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.published import measurements

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of a row, by name."""


def expandable(row: Mapping[str, Any]) -> bool:
    """Whether the allocator has segments that grow, which do not fall into fragments: torchtitan
    asks for them in its run_train.sh."""
    return bool(row["source"].startswith("torchtitan"))


def streams_bytes(row: Mapping[str, Any], layer: float, shallow: float, layers: int) -> float:
    """Return what FSDP2 holds beside a step's own tensors, by torch's _fsdp_collectives.py.

    It gathers on one stream and reduces on another, whose cached blocks no other stream takes: the
    tables' and two layers' gathered weights, and all gradients, which are gone when the next step's
    activations are largest. Embedding and head are one group, whole from forward to backward.

    Args:
        row: a published row.
        layer: one rank's parameters of a layer.
        shallow, layers: its parameters of a model of so many layers.
    """
    ranks, depth = row.get("dp", 1), measurements().models[row["model"]]["layers"]
    tables = shallow - layers * layer
    gathered = 2 * ranks * (tables + 2 * layer)
    reduced = DTYPES[row["gradients"]].itemsize * (tables + depth * layer)
    return gathered + ranks * tables + reduced
