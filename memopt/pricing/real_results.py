"""Compares the memory that kernels leave with what a captured graph says that they write.

A graph is made of results as fake kernels describe them. A fake kernel that describes two results
as one, or a result as a view of an argument that the kernel copies, would make every plan's peak
silently wrong by their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memopt.errors import CaptureError
from memopt.models.budget import format_bytes
from memopt.models.device import in_blocks
from memopt.pricing.cache import Cost
from memopt.step.backend import backend_of, is_on_host
from memopt.step.build import Lowering
from memopt.step.memory_layout import storage_of
from memopt.step.signature import Arguments, Signature
from memopt.torch_private import pytree


def left_bytes(result: object, arguments: Arguments, device: torch.device) -> tuple[int, ...]:
    """Return a device's bytes of each storage that a call made for its results, in their order. A
    result in the storage of an argument, or of an earlier result, has none."""
    block = backend_of(device).block_bytes
    given = (one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor))
    seen = set(map(storage_of, given))
    sizes = []
    for value in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(value, torch.Tensor) and storage_of(value) not in seen:
            seen.add(storage_of(value))
            own = 0 if is_on_host(value, device) else value.untyped_storage().nbytes()
            sizes.append(in_blocks(own, block))
    return tuple(sizes)


def check_places(call: Signature, result: object) -> None:
    """Refuse a call whose kernel leaves a result on another kind of device than the graph has it.
    What then reads it would be given a pointer that it cannot follow, which ends the process.

    Raises:
        CaptureError: there is such a result.
    """
    found = result if isinstance(result, (tuple, list)) else (result,)
    for number, (value, place) in enumerate(zip(found, call.places, strict=False)):
        if isinstance(value, torch.Tensor) and place is not None and value.device.type != place:
            raise CaptureError(
                f"{call.target} leaves its result {number} on {value.device.type!r}, and its fake "
                f"kernel says {place!r}. If the operator is yours, correct its fake kernel "
                "(torch.library.register_fake); else plan the modules around it, and please "
                "report it"
            )


def difference(lowering: Lowering, costs: Sequence[Cost]) -> str | None:
    """Say which operator's kernel leaves another number of storages than the graph says; None if
    none does. (Their sizes may differ: the graph adopts the kernel's.)"""
    graph = lowering.graph
    for operator, cost in zip(graph.operators, costs, strict=True):
        if operator.collective is None and len(operator.writes) != len(cost.output_bytes):
            said = [graph.tensors[t].size_bytes for t in operator.writes]
            return (
                f"{operator.target} ({operator.name}) leaves {_listed(cost.output_bytes)} in "
                f"memory, where the captured graph has {_listed(said)}: its fake kernel describes "
                "other results than the kernel returns, and no plan could keep a budget. If the "
                "operator is yours, correct its fake kernel (torch.library.register_fake); else "
                "plan the modules around it, and please report it"
            )
    return None


def check_results(lowering: Lowering, costs: Sequence[Cost]) -> None:
    """Refuse a graph that writes another number of storages than its kernels leave.

    Raises:
        CaptureError: `difference` finds such an operator.
    """
    found = difference(lowering, costs)
    if found is not None:
        raise CaptureError(found)


def _listed(sizes: Sequence[int]) -> str:
    each = " + ".join(map(str, sizes)) or "0"
    return f"{format_bytes(sum(sizes))} ({each} bytes)"
