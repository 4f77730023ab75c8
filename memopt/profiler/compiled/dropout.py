"""Random numbers as a function of a seed: a step draws all its seeds by one random operator.

A dropout whose numbers come from the process's generator is not a function of what it reads: when
it runs again, as a part of a kernel, it draws others. Inside regions it reads a seed; run again it
draws what it drew. The seeds are drawn once a step, from the generator, so that `manual_seed` gives
the same step again; the numbers are Inductor's, not eager's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.profiler.as_eager.dropout import EAGER_DROPOUT
from memopt.profiler.as_eager.operators import define

_ATEN = torch.ops.aten
_LARGEST = 2**63 - 1


def _drawn(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(_LARGEST, (count,), device=device, dtype=torch.int64)


SEEDS = define(
    "seeds(int count, Device device) -> Tensor",
    _drawn,
    lambda count, device: torch.empty((count,), dtype=torch.int64, device=device),
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""`memopt::seeds(count, device)`: the seeds of a step, int64, one for each dropout."""


def is_dropout(node: Node) -> bool:
    """Whether a node is a dropout that keeps some elements and drops some."""
    if node.target not in (_ATEN.native_dropout.default, EAGER_DROPOUT):
        return False
    _, p, train = node.args
    return train is not False and 0.0 < float(p) < 1.0  # type: ignore[arg-type]


def seeded(graph: FxGraph, x: Node, p: float, seeds: Node, index: int) -> tuple[Node, Node]:
    """The result and the mask of a dropout that draws by a seed, as nodes of a graph.

    Args:
        graph: gets the nodes.
        x: what is dropped out, any shape.
        p: the share that is dropped.
        seeds: of the step, int64.
        index: of the dropout's seed.
    """
    value: torch.Tensor = x.meta["val"]
    prims: Any = torch.ops.prims
    seed = graph.call_function(prims.inductor_lookup_seed.default, (seeds, index))
    drawn = graph.call_function(
        prims.inductor_random.default, (list(value.shape), seed, "rand")
    )
    mask = graph.call_function(_ATEN.gt.Scalar, (drawn, p))
    kept = graph.call_function(_ATEN.mul.Tensor, (x, mask))
    return graph.call_function(_ATEN.mul.Tensor, (kept, 1.0 / (1.0 - p))), mask
