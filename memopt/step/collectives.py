"""Describes functional collectives (`torch.ops._c10d_functional`) in a captured graph.

A collective starts where it is called. `wait_tensor` waits for it and returns the same storage, so
that it is a view, no operator: a collective's result is always read through its wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memopt.errors import CaptureError
from memopt.models.collective import Collective, CollectiveKind
from memopt.torch_private import pytree
from memopt.torch_private.access import private
from memopt.torch_private.operators import OpOverload, collectives, schema_of
from memopt.torch_private.tensors import held_once

_KINDS = {
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
}
_NAMESPACE = "_c10d_functional"
WAIT = collectives().wait_tensor.default
"""Operator that waits for the collective that writes a tensor, and returns the tensor."""
LETS_GO_S = 0.2
"""How long gloo's thread has to let go of a collective's tensors."""
_OTHER_END = frozenset({CollectiveKind.ALL_GATHER})
"""Kinds whose result is the whole; for the others the argument is the whole."""


def is_wait(target: Any) -> bool:
    """Return whether a call's target waits for a collective, and returns its result."""
    return target is WAIT


def is_collective(target: Any) -> bool:
    """Return whether a call's target is a collective, not the wait for one."""
    known = isinstance(target, OpOverload) and target.namespace == _NAMESPACE
    return known and target is not WAIT


def waited(result: Any) -> Any:
    """Wait for a collective, and return its result, one tensor or several."""
    result = pytree.tree_map_only(torch.Tensor, WAIT, result)
    return pytree.tree_map_only(torch.Tensor, let_go, result)


def let_go(result: torch.Tensor) -> torch.Tensor:
    """Return a result of a collective whose results were all waited for, once gloo no longer holds
    it.

    gloo's thread drops a collective's tensors after the wait has returned, on a busy machine much
    later; memory that the step frees in between would stay allocated. Waits `LETS_GO_S` at most.
    """
    if result.device.type == "cpu":
        give_way(lambda: held_once(result), LETS_GO_S)
    return result


def give_way(done: Callable[[], bool], longest_s: float) -> None:
    """Yield the processor to a process group's thread until `done()`, for at most `longest_s`
    seconds."""
    deadline = time.perf_counter() + longest_s
    while not done() and time.perf_counter() < deadline:
        time.sleep(0)


def has_scratch(collective: Collective, device: torch.device | None) -> bool:
    """Return whether a collective takes memory of its own until it has been waited for: gloo
    reduces and scatters by summing up a copy of all."""
    on_cpu = device is not None and device.type == "cpu"
    return on_cpu and collective.kind is CollectiveKind.REDUCE_SCATTER


def collective_of(node: Node) -> Collective | None:
    """Return the collective that a call runs, with the bytes that it sends; None if it is no
    collective.

    Raises:
        CaptureError: memopt does not know the collective, or the process group is gone.
    """
    target: Any = node.target
    if not is_collective(target):
        return None
    kind = _KINDS.get(schema_of(target).name.partition("::")[2].removesuffix("_coalesced"))
    if kind is None:
        known = ", ".join(_KINDS)
        raise CaptureError(f"memopt cannot plan the collective {target!s}; it knows {known}")
    whole = node.meta["val"] if kind in _OTHER_END else _values(node.args[0])
    tensors = whole if isinstance(whole, (list, tuple)) else [whole]
    ranks = _ranks_of(str(node.args[-1]))
    return Collective(
        kind=kind,
        ranks=len(ranks),
        size_bytes=sum(tensor.nbytes for tensor in tensors),
        stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
    )


def members_in(module: GraphModule) -> tuple[int, ...]:
    """Return the ranks that a graph communicates with, ascending."""
    found: set[int] = set()
    for node in module.graph.nodes:
        if is_collective(node.target):
            found.update(_ranks_of(str(node.args[-1])))
    return tuple(sorted(found))


def _values(argument: Any) -> Any:
    if isinstance(argument, Node):
        return argument.meta["val"]
    return [one.meta["val"] for one in argument]


def _ranks_of(group: str) -> list[int]:
    """Return the ranks of the process group of this name, ascending."""
    from torch.distributed import get_process_group_ranks

    resolve = private("torch.distributed.distributed_c10d._resolve_process_group")
    try:
        found = resolve(group)
    except (LookupError, RuntimeError, ValueError) as error:
        raise CaptureError(
            f"the model communicates in a process group, {group!r}, that is not there: plan it "
            "while torch.distributed is initialised"
        ) from error
    return sorted(get_process_group_ranks(found))
