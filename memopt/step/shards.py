"""Reads and replaces the present rank's parts of tensors (torch's DTensor)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memopt.step.ranks import alone, ranks_among
from memopt.torch_private.modules import parameters_in
from memopt.torch_private.tensors import SHARD, base_of, flat_shard_of, shard_of, spec_of


def any_shards(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors is a DTensor, of which ranks hold parts."""
    return any(hasattr(one, SHARD) for one in tensors)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the present rank's part of a tensor: a DTensor's shard, else the tensor."""
    return shard_of(tensor) if hasattr(tensor, SHARD) else tensor


def with_local_part(
    tensor: torch.Tensor, replaced: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Make a DTensor of the same mesh, placements and shape over another local part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    local = replaced(shard_of(tensor)).detach()
    make: Callable[..., torch.Tensor] = DTensor
    return make(local, spec_of(tensor), requires_grad=tensor.requires_grad)


def like_part(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a local part in the form of a given tensor: a DTensor over it of the same mesh,
    placements and shape, if that one is a DTensor; else the local part itself."""
    if not hasattr(tensor, SHARD):
        return local
    from torch.distributed.tensor import DTensor

    make: Callable[..., torch.Tensor] = DTensor
    return make(local, spec_of(tensor), requires_grad=False)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of the present rank's part of a parameter or buffer."""
    return shard_of(tensor) if hasattr(tensor, SHARD) else tensor.data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Let a parameter or buffer, or the present rank's part of it, have other data."""
    if hasattr(tensor, SHARD):
        setattr(tensor, SHARD, data)
    else:
        tensor.data = data


def holders_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that hold other parts of a model's parameters than this one, and this one,
    ascending: along the sharded dimensions of their mesh. None if that is not one mesh."""
    specs = [spec_of(one) for one in model.parameters() if hasattr(one, SHARD)]
    meshes = {spec.mesh for spec in specs}
    if len(meshes) != 1:
        return ()
    (mesh,) = meshes
    split = {i for spec in specs for i, one in enumerate(spec.placements) if one.is_shard()}
    place = enumerate(mesh.get_coordinate() or ())
    along = tuple(slice(None) if i in split else at for i, at in place)
    return tuple(sorted(mesh.mesh[along].flatten().tolist()))


WHOLE_STEPS = "a model is trained by whole steps"
_OUTSIDE = "a model runs outside of its whole steps"

_LAST: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Model → what its ranks do with it, as they have last agreed."""


def note_use(model: nn.Module, doing: str) -> None:
    """Note what the ranks that hold parts of a model, which have just met, do with it."""
    _LAST[model] = doing


def meet_for(model: nn.Module, doing: str) -> None:
    """Let the ranks that hold parts of a model meet where they begin to do something else with it:
    a plan has other collectives than the model.

    Raises:
        RankError: a rank is gone, or does something else.
    """
    if _LAST.get(model) != doing:
        _LAST[model] = doing
        ranks = ranks_among(holders_of(model), model)
        if ranks is not None:
            ranks.exchanged(None, doing)


def meet_outside(model: nn.Module) -> None:
    """Let them meet where a model that is trained by whole steps runs outside of these."""
    if alone() and _LAST.get(model) == WHOLE_STEPS:
        meet_for(model, _OUTSIDE)


def held_gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the gradients that a model's parameters hold. (Computed tensors hold none, which
    `torch.func.functional_call` puts in the parameters' places; torch warns of asking them.)"""
    leaves = (one for one in parameters_in(model) if one.is_leaf)
    return (one.grad for one in leaves if one.grad is not None)


def padded_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of each rank's part of a DTensor, and of all parts, as `fully_shard` pads
    them to one size where a dimension does not divide evenly."""
    part_bytes, whole_bytes = local_part(tensor).nbytes, tensor.nbytes
    spec = spec_of(tensor)
    split = [
        (n, one.dim)
        for n, one in zip(spec.mesh.shape, spec.placements, strict=True)
        if one.is_shard()
    ]
    if len(split) == 1 and tensor.numel():
        ((ranks, dim),) = split
        rows = tensor.shape[dim]
        most = -(-rows // ranks)
        part_bytes = tensor.nbytes // rows * most
        whole_bytes = ranks * part_bytes
    return part_bytes, whole_bytes


def flat_bytes(model: nn.Module) -> int:
    """Return the bytes that a FullyShardedDataParallel holds around the forward of a module whose
    parameters are views of its flat one: its shard, and the flat gradients, one that its backward
    ends with and one to which that is added."""
    first = next(model.parameters(), None)
    if first is not None and first.is_leaf:
        return 0
    values = [value for one in model.modules() for value in vars(one).values()]
    bases = [base_of(value) for value in values if isinstance(value, torch.Tensor)]
    found = 0
    for flat in {id(base): base for base in bases if base is not None}.values():
        shard = flat_shard_of(flat)
        if shard is not None:
            apart = shard.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
            found += apart * shard.nbytes + flat.nbytes
            found += 0 if flat.grad is None else flat.grad.nbytes
    return found
