"""A region as a graph of its own: its inputs, its outputs and its computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

_ALIGNED = 64
"""Bytes: kernels may depend on a tensor's beginning within a block of so many."""


@dataclass(frozen=True)
class TensorLayout:
    """What a region's kernel depends on in an input or an output: shape, strides, dtype, device and
    alignment."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @staticmethod
    def of(value: torch.Tensor) -> TensorLayout:
        """Return the layout of a tensor. Its offset is counted modulo the alignment."""
        offset = int(value.storage_offset()) % max(1, _ALIGNED // value.dtype.itemsize)
        return TensorLayout(
            tuple(value.shape), tuple(value.stride()), value.dtype, value.device, offset
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        where = "" if self.device.type == "cpu" else f"@{self.device.type}"
        return f"{dtype}{list(self.shape)}s{list(self.strides)}+{self.offset}{where}"


@dataclass(frozen=True)
class Subgraph:
    """A region taken out of the step.

    Attributes:
        graph: of ATen operators; its placeholders are the inputs, then the dropouts' seeds.
        inputs: nodes of the step that the region reads.
        outputs: nodes of the step whose values the region writes, each in memory of its own.
        again: the outputs whose values the forward wrote, too: the region writes them again for
            readers in the backward.
        values: the outputs' (fake) values, as the region writes them.
        layouts: the placeholders' layouts.
        results: the outputs' layouts.
        dropouts: the dropouts of the step whose masks the region makes, in the order of their
            seeds: its own, and those whose masks it reads.
        key: equal regions have equal keys, in every process.
    """

    graph: FxGraph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    values: tuple[torch.Tensor, ...]
    layouts: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]
    dropouts: tuple[Node, ...]
    key: str
    again: frozenset[Node] = frozenset()
