"""Sharding: a model's parameters spread over the ranks of a mesh (ZeRO-3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from memopt.distributed.gathering import Sharding
from memopt.step.joined_collectives import BUCKETS
from memopt.step.ranks import members_in, ranks_in, telling_ranks
from memopt.step.shards import local_part, meet_outside, with_local_part
from memopt.torch_private import pytree
from memopt.torch_private.modules import call_goes_elsewhere, parameters_of

M = TypeVar("M", bound=nn.Module)

_MARK = "memopt_sharding"


def sharded(
    model: M,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    bucket_bytes: int,
) -> M:
    """Shard a model's parameters; see `memopt.shard`."""
    members = members_in(mesh) if isinstance(mesh, DeviceMesh) else ()
    with telling_ranks(model, "the model is sharded", members):
        return _sharded_together(
            model, mesh, Sharding(mesh, param_dtype, reduce_dtype), shard_placement_fn, bucket_bytes
        )


def _sharded_together(
    model: M,
    mesh: DeviceMesh,
    sharding: Sharding,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None,
    bucket_bytes: int,
) -> M:
    _check(model, mesh)
    param_dtype, reduce_dtype = sharding.param_dtype, sharding.reduce_dtype
    if bucket_bytes < 0:
        raise ValueError(f"bucket_bytes must be at least 0, got {bucket_bytes}")
    dims = {
        id(parameter): _dimension(name, parameter, sharding.ranks, shard_placement_fn)
        for name, parameter in model.named_parameters()
    }
    ranks = ranks_in(mesh, model)
    if ranks is not None:
        shapes = [(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
        facts = {
            "model": f"{type(model).__name__} {shapes}",
            "sharded dimensions": str(list(dims.values())),
            "arguments": f"{param_dtype=}, {reduce_dtype=}, {bucket_bytes=}",
        }
        ranks.check_same(facts, "the model is sharded")
    together = buckets(model, bucket_bytes, param_dtype)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        _shard_module(module, sharding, dims, together, made)
    _mark_running(model, sharding)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether `memopt.shard` has sharded a model."""
    return any(_MARK in vars(type(module)) for module in model.modules())


def _check(model: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"shard takes an nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            "shard takes a DeviceMesh of one dimension, or of two (replicas, shards): "
            "torch.distributed.device_mesh.init_device_mesh(device_type, (ranks,))"
        )
    if is_sharded(model):
        raise ValueError("the model is sharded already; shard the outermost module, once")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if call_goes_elsewhere(module):
            raise ValueError(
                f"{where} is compiled or wrapped already: shard first, then memopt.wrap"
            )
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"{where} is an {type(module).__name__}, which holds its parameters in a list of "
                "its own: shard the other modules, one by one"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor already (fully_shard, parallelize_module): leave out "
                "memopt.shard; after parallelize_module call fully_shard(model, mesh=...), and "
                "then memopt.wrap(model, budget=...), which takes both"
            )
        if parameter.device.type not in (mesh.device_type, "meta"):
            raise ValueError(
                f"{name} is on {parameter.device}, and the mesh on {mesh.device_type}: move the "
                "model first"
            )


def _dimension(
    name: str,
    parameter: nn.Parameter,
    ranks: int,
    placement_of: Callable[[nn.Parameter], Shard | None] | None,
) -> int:
    """Return the dimension along which a parameter is sharded: the user's; or the first, unless
    that leaves a rank without rows and another one can be divided evenly (stacked experts).

    Raises:
        ValueError: the user's placement is of another kind, or not even.
    """
    sizes = parameter.shape
    chosen = None if placement_of is None else placement_of(parameter)
    if chosen is None:
        rows = sizes[0] if sizes else ranks
        even = [dim for dim, size in enumerate(sizes) if dim and size and size % ranks == 0]
        return even[0] if even and -(-rows // ranks) * (ranks - 1) >= rows > 0 else 0
    if not isinstance(chosen, Shard) or not -len(sizes) <= chosen.dim < len(sizes):
        raise ValueError(
            f"shard_placement_fn gives {name}, of {len(sizes)} dimension(s), {chosen!r}: return "
            "torch.distributed.tensor.Shard(dim) of one of them, or None for memopt's choice"
        )
    dim: int = chosen.dim % len(sizes)
    if dim and sizes[dim] % ranks:
        raise ValueError(
            f"shard_placement_fn shards {name} along dimension {dim} of size {sizes[dim]}, which "
            f"{ranks} ranks do not divide evenly: only the first dimension may be uneven"
        )
    return dim


def _shard_module(
    module: nn.Module,
    sharding: Sharding,
    dims: dict[int, int],
    together: dict[int, int],
    made: dict[int, nn.Parameter],
) -> None:
    """Replace a module's own parameters by shards, and its class by one that gathers them."""
    own = {name: p for name, p in parameters_of(module).items() if p is not None}
    bucket_of = {name: together[id(p)] for name, p in own.items() if id(p) in together}
    readers: dict[str, Any] = {_MARK: sharding, BUCKETS: bucket_of}
    for name, parameter in own.items():
        if id(parameter) not in made:
            # By the old parameter's id: modules that share it find the same shard.
            made[id(parameter)] = _sharded(parameter, sharding, dims[id(parameter)])
        parameters_of(module)[name] = made[id(parameter)]
        rows = parameter.shape[0] if parameter.dim() else None
        readers[name] = property(sharding.reader(name, rows, dims[id(parameter)]))
    if own:
        kind = type(module)
        module.__class__ = type(f"Sharded{kind.__name__}", (kind,), readers)


def _sharded(parameter: nn.Parameter, sharding: Sharding, dim: int) -> nn.Parameter:
    mesh = sharding.mesh
    placement = Shard(dim) if parameter.dim() else Replicate()
    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
    source = None if parameter.is_meta else 0
    value: torch.Tensor = distribute_tensor(
        parameter.detach(), mesh, placements, src_data_rank=source
    )
    if local_part(value).untyped_storage().nbytes() != local_part(value).nbytes:
        # Of a rank with fewer rows than others it is a part of what was sent to it.
        value = with_local_part(value, torch.clone)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _mark_running(model: nn.Module, sharding: Sharding) -> None:
    """Add hooks that count the model's calls under way, and cast its inputs to `param_dtype`."""
    running, dtype = sharding.running, sharding.param_dtype

    def begin(model: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            meet_outside(model)
            running.calls += 1
        if dtype is None:
            return None
        return pytree.tree_map_only(torch.Tensor, lambda value: _cast(value, dtype), (args, kwargs))

    def end(_model: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            running.calls -= 1

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


_NUMBERS = itertools.count()


def buckets(model: nn.Module, bucket_bytes: int, dtype: torch.dtype | None) -> dict[int, int]:
    """Map the ids of parameters to the numbers of their buckets; no two calls share a number.

    A collective has a fixed latency, so small parameters are gathered together. Large ones are
    gathered alone, so that a plan can gather one again, or free it, without the rest of its block.
    Each parameter of a block, in order, goes to the first of the block's buckets with room for it.

    Args:
        model: before its parameters are sharded.
        bucket_bytes: at most so many bytes are in a bucket, counted unsharded.
        dtype: what parameters are gathered in; None: their own.
    """
    found: dict[int, int] = {}
    for block in _blocks(model):
        room: dict[int, int] = {}
        for parameter in block:
            if id(parameter) in found or not parameter.dim():
                continue
            size_bytes = parameter.numel() * (dtype or parameter.dtype).itemsize
            fitting = (bucket for bucket, left in room.items() if left >= size_bytes)
            bucket = next(fitting, None)
            if bucket is None:
                bucket = next(_NUMBERS)
                room[bucket] = bucket_bytes
            room[bucket] -= size_bytes
            found[id(parameter)] = bucket
    return found


def _blocks(model: nn.Module, within: bool = False) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each block, and of each module outside of blocks. A block is a module
    in a list that has modules of its own; blocks inside a block come before it."""
    is_list = isinstance(model, (nn.ModuleList, nn.Sequential))
    for child in model.children():
        block = is_list and any(True for _ in child.children())
        yield from _blocks(child, within or block)
        if block:
            yield list(child.parameters())
    if not within:
        yield list(model.parameters(recurse=False))
