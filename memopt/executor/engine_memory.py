"""The memory that torch's engines (DistributedDataParallel, `fully_shard`) keep around a model."""

from __future__ import annotations

from torch import nn

from memopt.models.charges import Charges
from memopt.models.device import in_blocks
from memopt.step.backend import backend_of
from memopt.step.shards import local_part, padded_bytes
from memopt.torch_private.modules import data_parallel_around
from memopt.torch_private.tensors import base_of


def bucket_bytes() -> int:
    """Return the bytes of the buckets of the DistributedDataParallel around the present call.
    Gradients that are views of them count as gradients; those that `no_sync` makes are none."""
    around = data_parallel_around()
    trained = [one for one in around.parameters() if one.requires_grad] if around else []
    if around is not None and around.gradient_as_bucket_view:
        trained = [one for one in trained if one.grad is None or base_of(one.grad) is None]
    return sum(in_blocks(one.nbytes, backend_of(one.device).block_bytes) for one in trained)


def gathering(model: nn.Module) -> Charges:
    """Return what `fully_shard` keeps beside a model's gathered parameters: its shards and what
    pads them to one size, and until the forward returns the buffer in which they were gathered."""
    kept_bytes = gathered_bytes = 0
    for one in model.parameters():
        if local_part(one) is not one:
            block_bytes = backend_of(one.device).block_bytes
            part_bytes, whole_bytes = padded_bytes(one)
            kept_bytes += in_blocks(part_bytes, block_bytes) + whole_bytes - one.nbytes
            gathered_bytes += in_blocks(whole_bytes, block_bytes)
    return Charges(bucket_bytes=kept_bytes, forward_bytes=gathered_bytes)
