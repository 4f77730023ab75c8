"""Traces the collectives of `torch.distributed.nn.functional` that functional ones can express.

Dynamo refuses them all. What it traces in their place here sends the same numbers, and adds them in
the same order as torch's own backward does, so that no bit differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional

from memopt.torch_private.access import private
from memopt.torch_private.operators import collectives

_OPS = collectives()
_OP_NAMES: dict[Any, str] = private("torch.distributed._functional_collectives.REDUCE_OP_TO_STR")
_SCATTERING = ("nccl", "xccl")
"""The backends on which torch's backward of a gather reduces and scatters."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _known(group: Any) -> tuple[str, int, bool]:
    group = dist.group.WORLD if group is None else group
    return group.group_name, group.size(), dist.get_backend(group) in _SCATTERING


class _AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, name: str) -> Tensor:
        ctx.op, ctx.name = op, name
        found: Tensor = _OPS.wait_tensor(_OPS.all_reduce(tensor.contiguous(), op, name))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        reduced = _OPS.all_reduce(gradients[0].contiguous(), ctx.op, ctx.name)
        return _OPS.wait_tensor(reduced), None, None


class _AllGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, name: str, scatters: bool) -> Tensor:
        ctx.ranks, ctx.name, ctx.scatters = ranks, name, scatters
        ctx.shape = tensor.shape
        flat = tensor.contiguous().view(-1)
        gathered = _OPS.wait_tensor(_OPS.all_gather_into_tensor(flat, ranks, name))
        found: Tensor = gathered.view(ranks, *tensor.shape)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        flat = gradients[0].contiguous().view(-1)
        if ctx.scatters:
            own = _OPS.reduce_scatter_tensor(flat, "sum", ctx.ranks, ctx.name)
            return _OPS.wait_tensor(own).view(ctx.shape), None, None, None
        part = [flat.shape[0] // ctx.ranks] * ctx.ranks
        parts = _OPS.wait_tensor(_OPS.all_to_all_single(flat, part, part, ctx.name))
        own = torch.sum(parts.view(ctx.ranks, *ctx.shape), dim=0)
        return own, None, None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, into: Any, out_of: Any, name: str) -> Tensor:
        ctx.into, ctx.out_of, ctx.name = into, out_of, name
        sent = _OPS.all_to_all_single(input.contiguous(), into, out_of, name)
        found: Tensor = _OPS.wait_tensor(sent)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        sent = _OPS.all_to_all_single(gradient, ctx.out_of, ctx.into, ctx.name)
        return _OPS.wait_tensor(sent), None, None, None


@torch.compiler.substitute_in_graph(functional.all_reduce, skip_signature_check=True)
def _all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    name, _, _ = _known(group)
    return _AllReduced.apply(tensor, _OP_NAMES[op], name)  # type: ignore[no-untyped-call]


@torch.compiler.substitute_in_graph(functional.all_gather, skip_signature_check=True)
def _all_gather(tensor: Any, group: Any = None) -> Any:
    name, ranks, scatters = _known(group)
    found = _AllGathered.apply(tensor, ranks, name, scatters)  # type: ignore[no-untyped-call]
    return tuple(found.unbind(0))


@torch.compiler.substitute_in_graph(functional.all_to_all_single, skip_signature_check=True)
def _all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
) -> Any:
    name, ranks, _ = _known(group)
    even = [output.shape[0] // ranks] * ranks, [input.shape[0] // ranks] * ranks
    into, out_of = output_split_sizes or even[0], input_split_sizes or even[1]
    found = _Exchanged.apply(input, into, out_of, name)  # type: ignore[no-untyped-call]
    return output.copy_(found)
