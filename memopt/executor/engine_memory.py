"""The memory that engines (DistributedDataParallel, `fully_shard`, DeepSpeed's ZeRO; autograd's,
which looks for anomalies) keep around a model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memopt.executor.held_memory import memory_of, size_of
from memopt.models.charges import Charges
from memopt.models.device import in_blocks
from memopt.models.warned import warn
from memopt.step.backend import backend_of
from memopt.step.shards import local_part, padded_bytes
from memopt.torch_private.engine_hooks import optimizer_of_engine
from memopt.torch_private.modules import data_parallel_around
from memopt.torch_private.tensors import base_of

_ZERO = "deepspeed.runtime.zero."
_BUCKETS = ("reduce_bucket_size", "partition_size", "overlap_comm")


def bucket_bytes() -> int:
    """Return the bytes of the buckets of the DistributedDataParallel around the present call.
    Gradients that are views of them count as gradients; those that `no_sync` makes are none."""
    around = data_parallel_around()
    trained = [one for one in around.parameters() if one.requires_grad] if around else []
    if around is not None and around.gradient_as_bucket_view:
        trained = [one for one in trained if one.grad is None or base_of(one.grad) is None]
    return sum(in_blocks(one.nbytes, backend_of(one.device).block_bytes) for one in trained)


def looked_at(model: nn.Module | None) -> Charges:
    """Return the memory in which `torch.autograd.detect_anomaly`, which is on, looks for NaN in the
    largest gradient of a parameter, once the backward has run."""
    if model is None or not torch.is_anomaly_check_nan_enabled():
        return Charges()
    trained = [one for one in model.parameters() if one.requires_grad]
    sizes = [(one.numel(), backend_of(one.device).block_bytes) for one in trained]
    looked_at_bytes = (in_blocks(n, block) + in_blocks(1, block) for n, block in sizes)
    return Charges(update_bytes=max(looked_at_bytes, default=0))


def gathering(model: nn.Module) -> Charges:
    """Return the memory that `fully_shard` keeps beside a model's gathered parameters: its shards
    with their padding, and, until the forward returns, the buffer in which they were gathered."""
    kept_bytes = gathered_bytes = 0
    for one in model.parameters():
        if local_part(one) is not one:
            block_bytes = backend_of(one.device).block_bytes
            part_bytes, whole_bytes = padded_bytes(one)
            kept_bytes += in_blocks(part_bytes, block_bytes) + whole_bytes - one.nbytes
            gathered_bytes += in_blocks(whole_bytes, block_bytes)
    return Charges(bucket_bytes=kept_bytes, forward_bytes=gathered_bytes)


def zero_charges(model: nn.Module) -> Charges:
    """Return the memory that DeepSpeed's optimizer (ZeRO-1, ZeRO-2) holds beside a model's
    parameters: master weights, state, and gradients and buckets of other micro-batches; once the
    backward has run, and hands its gradients over, also what it reduces them in."""
    optimizer = optimizer_of_engine(model)
    own = [] if optimizer is None else list(model.parameters())
    if not own:
        return Charges()
    device = own[0].device
    tensors = [one for one in _tensors_in(optimizer, own) if one.device == device]
    held = memory_of(tensors)
    own_bytes = sum(one.nbytes for one in own if one.untyped_storage().data_ptr() in held)
    item_bytes = max(one.itemsize for one in own)
    return Charges(
        state_bytes=max(0, size_of(held) - own_bytes),
        update_bytes=_bucket_elements(optimizer, tensors, [*map(torch.numel, own)]) * item_bytes,
    )


def _bucket_elements(optimizer: Any, held: Iterable[torch.Tensor], sizes: list[int]) -> int:
    """Return the most elements that ZeRO allocates to reduce gradients of these sizes, without the
    buckets among the tensors that it holds (as between micro-batches): its buckets, or the
    gradients of its partitions, beside what the largest leaves empty in a bucket and is copied to.
    Warn of a version that does not tell."""
    if not type(optimizer).__module__.startswith(_ZERO):
        return 0
    unknown = tuple(name for name in _BUCKETS if name not in vars(optimizer))
    if unknown:
        _warn_of_buckets(unknown)
    size, parts, overlaps = [vars(optimizer).get(name) for name in _BUCKETS]
    bucket, own, twice = int(size or 0), [int(one) for one in parts or ()], 2 * max(sizes)
    most = bucket + (twice if twice > 2 * bucket else 0)  # a larger one is reduced by itself
    if sum(sizes) > bucket:
        most = max(most, sum(own) + min(bucket, twice))
    kept = () if bucket in own else (one for one in held if one.numel() == bucket)
    return max(0, most + (bucket if overlaps else 0) - sum(map(torch.numel, kept)))


@functools.cache
def _warn_of_buckets(unknown: tuple[str, ...]) -> None:
    """Warn once that buckets of this version of DeepSpeed are not charged."""
    warn(
        f"this version of DeepSpeed has no {' and no '.join(unknown)} on its optimizer: what its "
        f"buckets of gradients need is not charged. Leave them room in the budget"
    )


def _tensors_in(holder: Any, own: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an engine's optimizer holds, and their gradients, except the gradients
    of the model's own parameters, which plans charge."""
    waiting: list[Any] = [vars(holder)]
    seen, without = set[int](), set(map(id, own))
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
            waiting.append(None if id(one) in without else one.grad)
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, Optimizer):
            waiting += [one.state, one.param_groups]
        elif type(one).__module__.startswith(_ZERO):
            waiting.append(vars(one))
