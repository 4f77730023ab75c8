"""memopt.shard: a model's parameters spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

M = TypeVar("M", bound="nn.Module")


def shard(
    model: M,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    bucket_bytes: int = 25 * 2**20,
) -> M:
    """Spread a model's parameters over the ranks of a mesh: each rank holds a part of every
    parameter, and gathers the others where the model reads it. Call it on every rank.

    The model is changed in place and returned. Its parameters become DTensors, sharded along their
    first dimension as `torch.distributed.fsdp.fully_shard` does, unless that leaves a rank without
    rows and another dimension is divided evenly (stacked experts): make the optimizer afterwards;
    `torch.nn.utils.clip_grad_norm_` clips by the norm over all ranks; `state_dict` keeps its keys,
    and `torch.distributed.checkpoint` saves and loads it. Gradients are averaged over the ranks.
    Rank 0's values are everyone's. Buffers stay as they are.

    A plan of the model (`memopt.wrap`, `memopt.plan`) has the gathering among its operators: which
    parameters are kept for the backward and which are gathered again is the planner's choice.
    Unplanned, all gathered parameters are kept. A plan joins the collectives of small parameters
    within a block (a module of a `ModuleList` or `Sequential` that has modules of its own) and,
    outside of blocks, within a module.

    Args:
        model: on the device of the mesh, or on meta.
        mesh: a DeviceMesh of one dimension; or of two, (replicas, shards): parameters are sharded
            over the second, and gradients are averaged over both (HSDP).
        param_dtype: parameters are gathered in it, and the model's floating-point inputs are cast
            to it; None: no change.
        reduce_dtype: gradients are averaged in it; None: in the dtype that they are computed in.
        shard_placement_fn: as `fully_shard`'s: parameter → the `Shard` of its dimension, which
            beyond the first must be divided evenly; None: memopt's choice.
        bucket_bytes: one collective gathers parameters of a block of up to so many bytes in all,
            counted unsharded, and one scatters their gradients (the size is that of DDP's
            buckets). 0: each parameter has its own.

    Raises:
        ValueError: the model or the mesh is of a kind that cannot be sharded; the message says
            what to do.
    """
    from memopt.distributed.shard import sharded

    return sharded(
        model,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        shard_placement_fn=shard_placement_fn,
        bucket_bytes=bucket_bytes,
    )
