"""Eager steps whose dropouts drop what compiled kernels drop, so that answers can be compared."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.kernels.compiled.dropout import SEEDS, kept_elements
from memopt.models.graph import Graph

_DRAW = torch.ops.aten.bernoulli_.float
_EVEN = 0.5
_SEED_BYTES = 8


def dropouts_in_kernels(graph: Graph) -> int:
    """How many dropouts of a step draw their numbers in compiled kernels."""
    drawn = (one for one in graph.operators if one.target == str(SEEDS))
    return sum(graph.tensors[one.writes[0]].size_bytes // _SEED_BYTES for one in drawn)


def _elsewhere(graph: Graph) -> set[int]:
    """Which of a step's dropouts stay ATen's, of all in the order in which eager draws: their
    operators have the names that tracing gave them."""
    found = (re.fullmatch(r"native_dropout(?:_(\d+))?", one.name) for one in graph.operators)
    return {int(one.group(1) or 0) for one in found if one is not None}


class SameMasks(TorchDispatchMode):
    """While it is active, eager's dropouts drop what a step drops after the same `manual_seed`:
    the seeds of its kernels are drawn at the first dropout, as the step draws them first; what
    stays ATen's draws as eager does. On the CPU.

    Args:
        graph: of the step.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._count = dropouts_in_kernels(graph)
        self._elsewhere = _elsewhere(graph)
        self._seeds: Iterator[Tensor] = iter(())
        self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _DRAW:
            return func(*args, **(kwargs or {}))
        noise, share = (*args, _EVEN)[:2]  # torch leaves a default out
        if not self._drawn:
            self._seeds = iter(torch.unbind(SEEDS(self._count, noise.device)))
        self._drawn += 1
        if self._drawn - 1 in self._elsewhere:
            return func(*args, **(kwargs or {}))
        return noise.copy_(_kept(noise.shape, round(1.0 - share, 12), next(self._seeds)))


def same_masks(graph: Graph) -> contextlib.AbstractContextManager[Any]:
    """`SameMasks` of a step, or nothing where no kernel has a dropout in it."""
    return SameMasks(graph) if dropouts_in_kernels(graph) else contextlib.nullcontext()


def _kept(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    graph = FxGraph()
    given = graph.placeholder("seed")
    graph.output(kept_elements(graph, torch.empty(shape), p, given))
    mask: Tensor = GraphModule({}, graph)(seed)
    return mask
