"""Tensors of which the present rank has a part (torch's DTensor)."""

from __future__ import annotations

from collections.abc import Callable

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What the present rank holds of a tensor: of a DTensor its shard, else the tensor."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def with_local_part(
    tensor: torch.Tensor, replaced: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A DTensor of the same mesh, placements and shape over another local part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    local = replaced(tensor._local_tensor).detach()
    make: Callable[..., torch.Tensor] = DTensor
    return make(local, tensor._spec, requires_grad=tensor.requires_grad)
