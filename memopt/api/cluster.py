"""Planning for a cluster without having it: one rank is planned, and stands for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memopt.api.sharding import shard
from memopt.models.mesh import Mesh
from memopt.models.optimizer_names import update_s
from memopt.plan_record import PlanRecord
from memopt.programs.network_use import network_use
from memopt.programs.replay import replay
from memopt.reductions.stage_map import has_updates
from memopt.report.texts import format_seconds


@contextlib.contextmanager
def on_mesh(model: Any, mesh: Mesh | None, mode: str) -> Iterator[Any]:
    """Yield the model as rank 0 of a mesh has it; without a mesh, unchanged.

    Raises:
        ValueError: a mesh with mode="measure", or with a model that is no function of a mesh.
    """
    if mesh is None:
        yield model
        return
    if mode != "estimate":
        raise ValueError(
            'mesh= describes a cluster to estimate, and needs mode="estimate". To measure, run the '
            "ranks (torchrun) and plan in each, without mesh="
        )
    from memopt.capture.fake_ranks import fake_ranks, model_on

    with fake_ranks(mesh) as devices:
        yield model_on(devices, model)


@contextlib.contextmanager
def sharded_over(model: Any, ranks: int) -> Iterator[Any]:
    """Spread a model over ranks that need not exist; leave it as it is for one rank."""
    if ranks == 1:
        yield model
        return
    with on_mesh(lambda mesh: shard(model, mesh), Mesh(data=ranks), "estimate") as built:
        yield built


@contextlib.contextmanager
def shared_over(model: Any, data: int, tensor: int) -> Iterator[Any]:
    """Share a model's layers over the ranks of `tensor`, as its `tp_plan` says, and spread its
    parameters over those of `data`; it may change the model."""
    from memopt.distributed.tensor_shares import share_layers

    def build(devices: Any) -> Any:
        made = model if tensor == 1 else share_layers(model, devices["tensor"])
        return made if data == 1 else shard(made, devices["data"])

    if data == tensor == 1:
        yield model
        return
    with on_mesh(build, Mesh(data=data, tensor=tensor), "estimate") as built:
        yield built


def with_cluster(record: PlanRecord, mesh: Mesh | None, inputs: Any) -> PlanRecord:
    """Add the figures of a step of all ranks to one rank's plan: in `stats`, and in a note.

    Stats: "ranks"; "network_s" and "network_hidden" (the share that overlaps with compute);
    "update_s", the optimizer's update of this rank's shards; if a rank's inputs hold token ids,
    "tokens_per_s" of all ranks and "tokens_per_s_per_rank", with the update.
    """
    if mesh is None:
        return record
    used = network_use(replay(record.graph, record.program, record.device))
    seconds = _update_s(record)
    stats: dict[str, object] = {
        "ranks": mesh.ranks,
        "network_s": used.time_s,
        "network_hidden": used.hidden,
        "update_s": seconds,
    }
    note = (
        f"One of {mesh.ranks:,} ranks ({mesh}); its collectives take "
        f"{format_seconds(used.time_s)}, {used.hidden:.0%} of it hidden"
    )
    tokens = tokens_of(inputs)
    if tokens and record.step_time_s > 0:
        total = tokens * mesh.batches / (record.step_time_s + seconds)
        stats |= {"tokens_per_s": total, "tokens_per_s_per_rank": total / mesh.ranks}
        note += f"; {total:,.0f} tokens/s, {total / mesh.ranks:,.0f} per rank"
        if seconds:
            note += f", with {format_seconds(seconds)} for the optimizer's update"
    if record.device.network is None:
        note += f". The device {record.device.name!r} has no network: collectives count as free"
    return replace(record, stats={**record.stats, **stats}, notes=(note + ".", *record.notes))


def _update_s(record: PlanRecord) -> float:
    """Return the time of the optimizer's update; 0 if it is unknown, or in the plan."""
    state = None if record.profiled is None else record.profiled.optimizer
    graph = record.graph
    if state is None or has_updates(graph):
        return 0.0
    gradient_bytes = sum(graph.tensors[one].size_bytes for one in graph.gradients)
    return update_s(state.name, gradient_bytes, state.bytes_total, record.device)


def tokens_of(inputs: Any) -> int:
    """Count the token ids in inputs: the elements of the largest integer tensor."""
    import torch

    from memopt.torch_private import pytree

    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    whole = [x for x in tensors if not (x.is_floating_point() or x.is_complex())]
    return max((x.numel() for x in whole if x.dtype is not torch.bool), default=0)


def examples_of(inputs: Any) -> int:
    """Return the batch size: the first dimension of the first tensor that has one."""
    from memopt.torch_private import pytree

    sizes = [leaf.shape for leaf in pytree.tree_leaves(inputs) if hasattr(leaf, "shape")]
    return next((int(size[0]) for size in sizes if len(size)), 1)


def with_adapters(model: Any, rank: int) -> Any:
    """Freeze a model and give its blocks' linear layers adapters of this rank, in place."""
    from memopt.profiler.adapters import adapted
    from memopt.profiler.shallow import block_lists

    return adapted(model, rank, inside=[one.path for one in block_lists(model)])
