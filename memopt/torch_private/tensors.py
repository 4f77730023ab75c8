"""Tensors and their storages: versions, hooks, addresses, shards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memopt.torch_private.access import attribute, attribute_name, private

version_of = attribute("torch.Tensor._version")
"""Return how often a tensor was updated in place."""
base_of = attribute("torch.Tensor._base")
"""Return the tensor that a view is of; None for other tensors."""
storage_key = attribute("torch.UntypedStorage._cdata")
"""Return a number that identifies a storage."""
GRADIENT_HOOKS = (
    attribute_name("torch.Tensor._backward_hooks"),
    attribute_name("torch.Tensor._post_accumulate_grad_hooks"),
)
"""The attributes of a tensor that hold the hooks on its gradient."""
gradient_hooks = operator.attrgetter(*GRADIENT_HOOKS)
"""Return the hooks on a tensor's gradient, by their numbers: on its way, and once it is added."""
hooks_on_the_way = operator.attrgetter(GRADIENT_HOOKS[0])
_use_count = attribute("torch.Tensor._use_count")
conjugated = private("torch._conj")
"""Return a conjugated view of a tensor."""
negated = private("torch._neg_view")
"""Return a negated view of a tensor."""
disabled_torch_function = private("torch._C._disabled_torch_function_impl")
"""The `__torch_function__` of tensors that take no part in operations."""


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return any(gradient_hooks(tensor))


def any_gradient_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors has hooks on its gradient."""
    return any(map(any, map(gradient_hooks, tensors)))


def hook_first(tensor: torch.Tensor, hook: Callable[[Any], None]) -> Any:
    """Let a tensor's gradient go through a hook before all others; return the hook's handle."""
    handle: Any = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = hooks_on_the_way(tensor)
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)  # autograd minds the order of insertion alone
    return handle


def held_once(tensor: torch.Tensor) -> bool:
    """Whether only its Python object holds a tensor, and not, for example, an autograd node."""
    return bool(_use_count(tensor)() == 1)


def holders(storage: torch.UntypedStorage) -> int:
    """Count the tensors that hold a storage."""
    return int(private("torch._C._storage_Use_Count")(storage_key(storage)))


def storage_at(address: int, device: torch.device, size_bytes: int) -> torch.UntypedStorage:
    """Make a storage over memory that somebody else owns and must keep alive."""
    make = private("torch._C._construct_storage_from_data_pointer")
    storage: torch.UntypedStorage = make(address, device, size_bytes)
    return storage


class TensorsKnown:
    """A fast check whether many tensors still have the shapes, strides, dtypes, devices and
    `requires_grad` flags that they had when they were learnt. It may say no although they have:
    under another autocast, for example."""

    def __init__(self) -> None:
        self._learnt: tuple[Callable[..., bool], Callable[[Any], tuple[Any, ...]] | None] | None
        self._learnt = None

    def __call__(self, tensors: tuple[Any, ...]) -> bool:
        """Return whether the tensors certainly are as they were learnt."""
        if self._learnt is None:
            return False
        check, chosen = self._learnt
        return check(*(tensors if chosen is None else chosen(tensors)))

    def learn(self, tensors: tuple[Any, ...]) -> None:
        """Learn the tensors as they are now. One that comes several times is checked once; whether
        it is still the same tensor at each place has to be checked elsewhere."""
        first = {id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}
        chosen = None
        if len(first) < len(tensors):
            numbers = sorted(first.values())
            chosen = operator.itemgetter(*numbers) if len(numbers) > 1 else _first
        taken = tensors if chosen is None else chosen(tensors)
        if all(type(one) in _ORDINARY and one.layout is torch.strided for one in taken):
            made = _guards(*taken, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._learnt = made.check, chosen


def _first(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tensors[:1]


_guards: Any = private("torch._C._dynamo.guards.TensorGuards")
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_DTENSOR = "torch.distributed.tensor.DTensor"
SHARD = "_local_tensor"
"""The attribute of a DTensor that is the present rank's shard."""


def shard_of(tensor: Any) -> torch.Tensor:
    """Return the present rank's shard of a DTensor."""
    shard: torch.Tensor = getattr(
        tensor, attribute_name("torch.distributed.tensor.DTensor._local_tensor")
    )
    return shard


def spec_of(tensor: Any) -> Any:
    """Return the mesh, placements and shape of a DTensor."""
    return getattr(tensor, attribute_name(f"{_DTENSOR}._spec"))


_FLAT_SHARD = "torch.distributed.fsdp._flat_param.FlatParameter._local_shard"


def flat_shard_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the present rank's part of a parameter into which FullyShardedDataParallel has
    flattened others; None for any other parameter."""
    name = _FLAT_SHARD.rpartition(".")[2]
    return getattr(tensor, attribute_name(_FLAT_SHARD)) if hasattr(tensor, name) else None
