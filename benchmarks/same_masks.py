"""Eager steps whose dropouts drop what compiled kernels drop, so that answers can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.models.graph import Graph
from memopt.profiler.compiled.dropout import SEEDS, kept_elements

_DRAW = torch.ops.aten.bernoulli_.float
_EVEN = 0.5
_SEED_BYTES = 8


def dropouts_in_kernels(graph: Graph) -> int:
    """How many dropouts of a step draw their numbers in compiled kernels."""
    drawn = (one for one in graph.operators if one.target == str(SEEDS))
    return sum(graph.tensors[one.writes[0]].size_bytes // _SEED_BYTES for one in drawn)


class SameMasks(TorchDispatchMode):
    """While it is active, eager's dropouts drop what a step's compiled kernels drop after the same
    `manual_seed`: the seeds are drawn at the first dropout, as the step draws them. All dropouts
    of the step must be in kernels, and on the CPU, and draw in the same order.

    Args:
        graph: of the step.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._count = dropouts_in_kernels(graph)
        self._seeds: Sequence[Tensor] = ()
        self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _DRAW:
            return func(*args, **(kwargs or {}))
        noise, share = (*args, _EVEN)[:2]  # torch leaves a default out
        if not self._drawn:
            self._seeds = torch.unbind(SEEDS(self._count, noise.device))
        mask = _kept(noise.shape, round(1.0 - share, 12), self._seeds[self._drawn])
        self._drawn += 1
        return noise.copy_(mask)


def same_masks(graph: Graph) -> contextlib.AbstractContextManager[Any]:
    """`SameMasks` of a step, or nothing where no kernel has a dropout in it."""
    return SameMasks(graph) if dropouts_in_kernels(graph) else contextlib.nullcontext()


def _kept(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    graph = FxGraph()
    given = graph.placeholder("seed")
    graph.output(kept_elements(graph, torch.empty(shape), p, given))
    mask: Tensor = GraphModule({}, graph)(seed)
    return mask
