"""What FSDP and torch's allocator hold beside a step's own tensors, as a published row was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.published import measurements
from benchmarks.published.meshes import gathered_itemsize, shards, titan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of a row, by name."""


def expandable(row: Mapping[str, Any]) -> bool:
    """Whether the allocator has segments that grow, as torchtitan asks in its run_train.sh. They
    have holes that larger tensors do not fit in, but as many however deep the model is."""
    return titan(row)


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
    ranks, depth = shards(row), measurements().models[row["model"]]["layers"]
    tables = shallow - layers * layer
    gathered = ranks * (2 * tables + 2 * gathered_itemsize(row) * layer)
    reduced = DTYPES[row["gradients"]].itemsize * (tables + depth * layer)
    return gathered + ranks * tables + reduced


def flat_bytes(row: Mapping[str, Any], parameters: int, blocks: int, layers: int) -> float:
    """Return what FSDP1 holds beside a block's work and all blocks' gradients.

    Its root stays gathered from the forward on (`_post_forward_reshard`); a flat parameter's
    gradient is a concatenation with zeros for what is frozen (torch's `split_with_sizes_backward`).

    Args:
        row: a published row.
        parameters: bytes of one rank's.
        blocks: bytes of the blocks' whole parameters.
        layers: the number of blocks.
    """
    return float(parameters * row.get("dp", 1) - blocks * (1 - 1 / layers))
