"""The memory of a random generator's state, which an operator that runs again brings along.

A random operator's first run saves the generator's state, a second run saves it, too, to put it
back. On the CPU torch hands out a state as a tensor of its allocator, copied and dropped before the
operator begins (`memopt.executor.random_state`). So at an operator that may run again there is
either the state or what the operator itself needs, whichever is larger. A CUDA generator's state
is a tensor of the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from memopt.models.graph import Graph, Implementation, Operator, Tensor
from memopt.profiler.backend import Backend


@functools.cache
def state_bytes() -> int:
    """Of a CPU generator's state, as torch's allocator counts it."""
    return torch.Generator().get_state().nbytes


def with_state(graph: Graph, backend: Backend, *, placed: bool = False) -> Graph:
    """The graph whose random operators that may run again have the state in their workspace.

    Args:
        graph: priced.
        backend: where the step runs.
        placed: the operators' results may be in an arena, which is there before they are.
    """
    if not backend.on_host:
        return graph
    operators = [
        _charged(one, graph.tensors, placed) if one.random and one.recomputable else one
        for one in graph.operators
    ]
    return replace(graph, operators=tuple(operators))


def _charged(operator: Operator, tensors: Sequence[Tensor], placed: bool) -> Operator:
    def workspace_bytes(figures: Operator | Implementation) -> int:
        writes = operator.writes if figures.writes is None else figures.writes
        results_bytes = 0 if placed else sum(tensors[t].size_bytes for t in writes)
        return max(figures.workspace_bytes, state_bytes() - results_bytes)

    choices = [replace(c, workspace_bytes=workspace_bytes(c)) for c in operator.implementations]
    bytes_now = workspace_bytes(operator)
    return replace(operator, workspace_bytes=bytes_now, implementations=tuple(choices))
