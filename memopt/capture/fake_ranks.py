"""Makes a process group of absent ranks: collectives have shapes and send nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memopt.models.mesh import Mesh
from memopt.torch_private.access import private


@contextlib.contextmanager
def fake_ranks(mesh: Mesh) -> Iterator[DeviceMesh]:
    """Be rank 0 of a mesh inside, in torch's `fake` process group.

    Raises:
        ValueError: torch.distributed is initialised: there are real ranks.
    """
    if dist.is_initialized():
        raise ValueError(
            "mesh= is for a cluster that is not there, but torch.distributed is initialised: leave "
            "mesh= out to plan for the ranks that run, or plan in another process"
        )
    store = private("torch.testing._internal.distributed.fake_pg.FakeStore")()
    dist.init_process_group("fake", rank=0, world_size=mesh.ranks, store=store)
    try:
        yield init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    finally:
        dist.destroy_process_group()


def model_on(mesh: DeviceMesh, model: Any) -> nn.Module:
    """Build the model of rank 0.

    Args:
        mesh: as in `fake_ranks`.
        model: a function from a DeviceMesh to the model whose parts communicate over it.

    Raises:
        ValueError: `model` is a module already, which knows nothing of the mesh, or returns none.
    """
    if isinstance(model, nn.Module) or not callable(model):
        raise ValueError(
            "with mesh= the model is a function from a torch DeviceMesh to an nn.Module that "
            "communicates over it: lambda mesh: memopt.shard(build(), mesh), or one that calls "
            "parallelize_module or fully_shard"
        )
    build: Callable[[DeviceMesh], Any] = model
    made = build(mesh)
    if not isinstance(made, nn.Module):
        raise ValueError(f"the function of the mesh gives a {type(made).__name__}, no nn.Module")
    return made
