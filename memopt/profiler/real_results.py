"""The memory that kernels leave, compared with what a captured graph says that they write.

Fake kernels describe results, and a graph is made of what they say. One that describes two results
as one, or a result as a view of an argument that the kernel copies, would make every plan's peak
wrong by their bytes without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

from memopt.errors import CaptureError
from memopt.models.budget import format_bytes
from memopt.models.device import in_blocks
from memopt.profiler.backend import backend_of
from memopt.profiler.build import Lowering
from memopt.profiler.cache import Cost
from memopt.profiler.memory_layout import storage_of
from memopt.profiler.signature import Arguments


def left_bytes(result: object, arguments: Arguments, device: torch.device) -> tuple[int, ...]:
    """Storage bytes of each tensor that a call has returned; 0 of one in the storage of an argument
    or of a result before it."""
    block = backend_of(device).block_bytes
    given = (one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor))
    seen = set(map(storage_of, given))
    sizes = []
    for value in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(value, torch.Tensor):
            new = storage_of(value) not in seen
            sizes.append(in_blocks(value.untyped_storage().nbytes(), block) if new else 0)
            seen.add(storage_of(value))
    return tuple(sizes)


def check_results(lowering: Lowering, costs: Sequence[Cost]) -> None:
    """Refuse a graph in which an operator writes other results than its kernel leaves.

    Args:
        lowering: the graph.
        costs: the measured cost of each of its operators.

    Raises:
        CaptureError: there is one, named.
    """
    graph = lowering.graph
    for operator, node, cost in zip(graph.operators, lowering.nodes, costs, strict=True):
        if operator.collective is not None:
            continue
        held = [t for t in lowering.storages[node] if t is not None]
        new = [t in operator.writes and t not in held[:i] for i, t in enumerate(held)]
        said = [graph.tensors[t].size_bytes if own else 0 for t, own in zip(held, new, strict=True)]
        # Kernels may return larger storages than their fake ones, but no other number of them.
        real = cost.output_bytes
        if len(held) != len(real) or any(
            own != (size > 0) and (size > 0 or said[i] > 0)
            for i, (own, size) in enumerate(zip(new, real, strict=True))
        ):
            raise CaptureError(
                f"{operator.target} ({operator.name}) leaves {_listed(real)} in "
                f"memory, where the captured graph has {_listed(said)}: its fake kernel describes "
                "other results than the kernel returns, and no plan could keep a budget. Please "
                "report this operator; until then keep it out of the planned module, or correct "
                "the fake kernel if it is yours (torch.library.register_fake)"
            )


def _listed(sizes: Sequence[int]) -> str:
    return f"{format_bytes(sum(sizes))} ({' + '.join(map(str, sizes)) or 0} bytes)"
