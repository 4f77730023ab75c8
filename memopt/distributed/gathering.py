"""Gathering sharded parameters where they are read; their gradients are averaged over the ranks and
scattered to them (ZeRO-3, Rajbhandari et al., arXiv:1910.02054, §5.3).

The collectives are torch's functional ones, which capture sees as operators: a plan may gather a
parameter again in the backward, or keep it, as it may any activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from memopt.torch_private.modes import backward_number
from memopt.torch_private.modules import registered_parameter
from memopt.torch_private.operators import collectives

_OPS = collectives()


@dataclass
class WholeForward:
    """Whether a sharded model's forward runs, during which its parameters are read whole.

    Attributes:
        calls: how many calls of the model are under way.
    """

    calls: int = 0

    def reads_whole(self) -> bool:
        """Whether reading a parameter now gathers it: during a forward, a backward (which may run a
        part of the forward again) and a trace by dynamo. Otherwise the registered shard is read."""
        if torch.compiler.is_dynamo_compiling():
            return True
        return self.calls > 0 or backward_number() != -1


@dataclass(frozen=True)
class Sharding:
    """How parameters are spread over the ranks.

    Attributes:
        mesh: of one dimension, over which parameters are sharded; or of two: they are sharded over
            the second and replicated over the first (HSDP).
        param_dtype: the dtype in which they are gathered and computed with; None: their own.
        reduce_dtype: the dtype in which gradients are averaged; None: that of their computation.
        running: whether the model's forward runs.
    """

    mesh: DeviceMesh
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    running: WholeForward = field(default_factory=WholeForward)

    @property
    def ranks(self) -> int:
        """How many ranks share one copy of the parameters."""
        return self.mesh.size(self.mesh.ndim - 1)

    def reader(self, name: str, rows: int | None, dim: int = 0) -> Callable[[Any], Any]:
        """Return the reader of a parameter: whole while the model runs, else as registered.

        Args:
            name: of the parameter in its module.
            rows: its size along the first dimension; None: it has no dimensions and is replicated.
            dim: the dimension along which it is sharded; beyond the first one evenly.
        """
        running, route = self.running, self._route()

        def read(module: Any) -> Any:
            parameter = registered_parameter(module, name)
            if parameter is None or not running.reads_whole():
                return parameter
            local = parameter.to_local()
            return _read_whole(local, rows, dim, *route)

        return read

    def _route(self) -> _Route:
        groups = [self.mesh.get_group(i).group_name for i in range(self.mesh.ndim)]
        replicas = (self.mesh.size(0), groups[0]) if self.mesh.ndim == 2 else (1, "")
        return _Route(self.ranks, groups[-1], *replicas, self.param_dtype, self.reduce_dtype)


class _Route(NamedTuple):
    """The ranks over which a parameter is gathered and its gradient averaged, as constants.

    Attributes:
        ranks, group: how many ranks share one copy of the parameters; their group's name.
        replicas, replica_group: how many copies there are; their group's name, "" if there is one.
        param_dtype, reduce_dtype: as in `Sharding`.
    """

    ranks: int
    group: str
    replicas: int
    replica_group: str
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _read_whole(local: Tensor, rows: int | None, dim: int, *route: Any) -> Any:
    """Read a parameter whole, from one rank's part, by a route's parts. Dynamo takes the call as it
    is; it needs longer to look into a custom function than for all else of a linear layer."""
    if rows is None:
        return _Replicated.apply(local, _Route(*route))  # type: ignore[no-untyped-call]
    return _Gathered.apply(local, rows, dim, _Route(*route))  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """Gathers the whole from the shards; its backward averages the gradient and scatters it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: int, dim: int, route: _Route) -> Tensor:
        ranks = route.ranks
        ctx.route, ctx.dim, ctx.dtype = route, dim, local.dtype
        ctx.padded, ctx.own = -(-rows // ranks), local.shape[0]
        ctx.uneven = dim == 0 and rows % ranks != 0
        shard = local if route.param_dtype is None else local.to(route.param_dtype)
        if ctx.uneven:
            # Ranks without missing rows pad, too, so that all run the same operators.
            shard = _with_rows(shard, ctx.padded)
        if ranks == 1:
            return shard.clone()
        full: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(shard, ranks, route.group))
        if dim:
            return torch.cat(full.chunk(ranks), dim)
        return full.narrow(0, 0, rows) if ctx.uneven else full

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, route = gradients[0].contiguous(), ctx.route
        if route.reduce_dtype is not None:
            gradient = gradient.to(route.reduce_dtype)
        if ctx.uneven:
            gradient = _with_rows(gradient, ctx.padded * route.ranks)
        if route.ranks > 1:
            if ctx.dim:
                gradient = torch.cat(gradient.chunk(route.ranks, ctx.dim)).contiguous()
            scattered = _OPS.reduce_scatter_tensor(gradient, "avg", route.ranks, route.group)
            gradient = _OPS.wait_tensor(scattered)
        gradient = _averaged(gradient, route.replicas, route.replica_group)
        if ctx.uneven:
            gradient = gradient.narrow(0, 0, ctx.own)
        return gradient.to(ctx.dtype), None, None, None


class _Replicated(torch.autograd.Function):
    """Reads a parameter without dimensions, which every rank has; averages its gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, route: _Route) -> Tensor:
        ctx.route, ctx.dtype = route, local.dtype
        return local.to(route.param_dtype or local.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        gradient = gradients[0].to(route.reduce_dtype or gradients[0].dtype, copy=True)
        gradient = _averaged(gradient, route.ranks, route.group)
        gradient = _averaged(gradient, route.replicas, route.replica_group)
        return gradient.to(ctx.dtype), None


def _averaged(gradient: Tensor, ranks: int, group: str) -> Tensor:
    """Average a gradient over the ranks of a group."""
    if ranks == 1:
        return gradient
    averaged: Tensor = _OPS.wait_tensor(_OPS.all_reduce(gradient, "avg", group))
    return averaged


def _with_rows(value: Tensor, rows: int) -> Tensor:
    """Pad a tensor with rows of zeros to `rows` rows."""
    padding = [0, 0] * (value.dim() - 1) + [0, rows - value.shape[0]]
    return torch.constant_pad_nd(value, padding)
