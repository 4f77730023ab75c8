"""A region as a graph of its own: what goes in, what comes out, and what it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

_ALIGNED = 64
"""Bytes: kernels may ask where in them a tensor begins."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that goes into a region or comes out of it: all that its kernel depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @staticmethod
    def of(value: torch.Tensor) -> TensorLayout:
        """The layout of a tensor; of its offset what matters to alignment."""
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
        outputs: nodes of the step whose values it writes, each in memory of its own.
        again: those of them whose values the forward wrote, too: it writes them for what reads
            them in the backward.
        values: of the outputs, as the region writes them (fake).
        layouts: of the placeholders.
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
