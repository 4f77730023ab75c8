"""Estimates one rank's peak and seconds of a published step.

Nothing is computed: one rank's decoder is captured on `meta` with fake tensors
(`benchmarks.published.decoder`), priced for the GPU on which others have measured, at two depths,
and its peak and time are continued to the published depth: layers are alike, so that both are
linear in their number. A pipeline's last stage stands for it, whose memory Megatron reports.
Parameters, gradients that stay between micro-batches, and the optimizer's state are counted from
the shape; activations, temporaries and times are memopt's estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.published import measurements, meshes, row_of, tokens
from benchmarks.published.decoder import Decoder, LossApart, Style
from benchmarks.published.decoder import sharded as shard_as_published
from benchmarks.published.meshes import (
    ALL_DEVICES,
    DTYPES,
    MEMORY_ONLY,
    device_of,
    expandable,
    flat_bytes,
    streams_bytes,
)
from memopt.api.cluster import on_mesh
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.graph import Graph, TensorKind
from memopt.pricing.measure import with_costs
from memopt.pricing.roofline import estimate_costs
from memopt.pricing.workspace import cublas_workspace_bytes
from memopt.profiler.estimate import estimate_model
from memopt.programs.allocator_requests import reserved_by
from memopt.programs.allocator_settings import AllocatorSettings
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import bytes_during, lifetimes
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.kernel import FusedKernel
from memopt.step.loss import Loss

_MEMORIES = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
_UNKNOWN = {
    "quantized": "weights in 4 bits", "offload": "offloaded tensors", "adapter": "other adapters",
    "ep": "experts", "uneven_stages": "stages of unlike depth", "cuda_graphs": "CUDA graphs",
    "schedule": "pipelines' other schedules", "sequence_parallel": "sequence parallelism",
}  # fmt: skip
_PLAIN = ("gpt2", "mpt", None)
TIMES = ("products", "attention", "other", "network", "exposed")


def why_not(row: Mapping[str, Any]) -> str:
    """Say why a row has no estimate; "": it has one."""
    shape = measurements().models.get(row.get("model", ""), {})
    if not {"sequence", "batch", "parameters"} <= row.keys() or not shape:
        return "shape, sequence or batch not published"
    known = ("schedule", "sequence_parallel") if meshes.titan(row) else ()
    for field, why in _UNKNOWN.items():
        if row.get(field) and field not in known:
            return why
    if shape.get("experts") or shape.get("kind") not in _PLAIN or shape.get("attention"):
        return "experts, latent attention, encoders"
    if row.get("kernels") == "written":
        return "operators written out by hand"
    if shape.get("norms"):
        return "more norms than two"
    if row.get("attention") == "flex" or (row.get("dtype") == "float8" and not meshes.titan(row)):
        return "float8 or flex attention"
    if row.get("optimizer") not in ("adam", "adamw", "adamw-8bit") or "state_bytes" not in row:
        return "the optimizer's state"
    if row.get("sharding") == "other" or row.get("gradients") == "none":
        return "other shardings, updates in the backward"
    if row["gpu"] not in ALL_DEVICES:
        return "the GPU's rates"
    return "" if _memory_of(row) or _time_of(row) else "nothing measured that is estimated"


def _sharded(row: Mapping[str, Any]) -> bool:
    """Whether a rank has a part of each parameter between two steps."""
    return row.get("sharding") in ("gradients", "parameters") and not meshes.staged(row)


def _memory_of(row: Mapping[str, Any]) -> str:
    return next((field for field in _MEMORIES if field in row), "")


def _time_of(row: Mapping[str, Any]) -> float:
    """Return the published seconds of a step, if its estimate is one; else 0. How Megatron
    sends a context's keys is not modelled; functional tests of narrow models take the host's
    time."""
    if row["gpu"] in MEMORY_ONLY or (row.get("cp", 1) > 1 and not meshes.titan(row)):
        return 0.0
    if row["source"] == "megatron" and measurements().models[row["model"]]["hidden"] < 1024:
        return 0.0
    if "step_s" in row:
        return float(row["step_s"])
    return tokens(row) / row["tokens_per_s"] if "tokens_per_s" in row else 0.0


_WITH_LOSS = ("llm.c", "deepspeed", "torchtitan-1690", "torchtitan-4636", "torchtitan-h200")
"""Sources that compile the loss, too: models that take labels, and torchtitan since 2025. Before,
and in torchtune, layers are compiled one by one."""


def style_of(row: Mapping[str, Any]) -> Style:
    """Return how the row's framework computes a layer."""
    source, megatron = row["source"], row["source"] == "megatron"
    fused = megatron or source in ("llm-foundry", "llm.c")
    own = source in ("raschka", "litgpt", "litgpt-hub")
    # TorchScript's fusion overwrites nothing.
    in_place = fused and not (megatron and row.get("loss") == "fused")
    loss = "in place" if in_place else "own" if own else "float"
    loss = "none" if meshes.staged(row) else "parallel" if row.get("sequence_parallel") else loss
    lora = tuple(row.get("lora_layers", "").split())
    each = row.get("kernels") == "compiled" and not source.startswith(_WITH_LOSS)
    return Style(
        apart=each and loss != "none",
        eager=not fused,
        scores=row.get("attention") == "scores",
        wide_softmax=row.get("softmax") == "float32",
        packed=source.startswith("litgpt"),
        held=source.startswith("litgpt"),
        loss="chunks" if row.get("loss") == "chunked" or source.startswith("litgpt") else loss,
        lora=lora,
        rank=row.get("lora_rank", 0),
        tensor=row.get("tp", 1),
        lora_dropout=row.get("lora_dropout", 0.0),
        spread=row.get("sequence_parallel", False),
        alone=each and meshes.titan(row) and row.get("recompute") == "full",
    )


@dataclass(frozen=True)
class _Captured:
    """One depth of a rank's decoder, captured: of what only pricing depends on the GPU."""

    profiled: Any
    device: Device
    sizes: Mapping[str, int]
    """Bytes of this rank's parameters, of blocks' whole ones, and the number that are trained."""
    loss_s: float = 0.0
    """Of a loss that is no part of it."""


@lru_cache(maxsize=8)
def _captured(key: str, name: str, layers: int) -> _Captured:
    row = row_of(name)
    shape, style, first = _shape_of(row), style_of(row), row.get("pp", 1) == 1
    sequence, sharded = row["sequence"] // row.get("cp", 1), _sharded(row)
    dtype, sizes = DTYPES["bfloat16" if meshes.staged(row) else row["parameters"]], Counter[str]()

    def build(mesh: Any = None) -> nn.Module:
        with torch.device("meta"):
            model = Decoder(shape, style, layers, sequence, first).to(dtype)
        if mesh is not None:
            model = shard_as_published(model, mesh)
        for path, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            sizes["bytes"] += local.nbytes
            sizes["blocks"] += parameter.nbytes * ("layers." in path)
            sizes["trained"] += local.numel() * parameter.requires_grad
        return model.train()

    with ExitStack() as ranks, torch.device("meta"):
        width = () if first else (shape["hidden"],)
        kind = torch.int64 if first else dtype
        rows = sequence if first or not style.spread else sequence // style.tensor
        given = torch.zeros(row["batch"], rows, *width, dtype=kind, requires_grad=not first)
        targets = torch.zeros(row["batch"], sequence, dtype=torch.int64)
        mesh = memopt.Mesh(data=meshes.shards(row)) if sharded else None
        model = ranks.enter_context(on_mesh(build, mesh, "estimate")) if mesh else build()
        kernels = "compiled" if row.get("kernels") == "compiled" else "aten"
        device = device_of(row)
        if not style.apart:
            found = estimate_model(model, (given, targets), device, kernels=kernels)
            return _Captured(found, device, sizes)
        loss = Loss(lambda logits, right: model.loss(logits, right), (targets,))
        found = estimate_model(model, (given,), device, loss=loss, kernels=kernels)
        parts = 8 if style.loss == "chunks" else 1
        each = row["batch"] * sequence // parts, model.head.base.out_features
        logits = [torch.zeros(each, dtype=dtype, requires_grad=True) for _ in range(parts)]
        alone = estimate_model(LossApart(model), (targets, *logits), device)
    loss_s = sum(operator.time_s for operator in alone.graph.operators)
    return _Captured(found, device, sizes, loss_s)


def _shape_of(row: Mapping[str, Any]) -> dict[str, Any]:
    shape = dict(measurements().models[row["model"]])
    if row["source"] == "megatron":
        unit = 128 * row.get("tp", 1)
        shape["vocabulary"] = -(-shape["vocabulary"] // unit) * unit
    return shape


def _priced(row: Mapping[str, Any], layers: int) -> tuple[_Captured, Graph, Device]:
    """Capture a depth, or take the same graph from a row before, and price it for this GPU."""
    shape = {k: v for k, v in _shape_of(row).items() if k != "layers"}
    ranks = meshes.shards(row) if _sharded(row) else 1
    compiled, device = row.get("kernels") == "compiled", device_of(row)
    sizes = [row["sequence"], row["batch"], row.get("cp", 1), row.get("pp", 1) == 1, ranks]
    key = repr((shape, style_of(row), sizes, row["parameters"], compiled and device))
    one = _captured(key, _NAMES.setdefault(key, row["name"]), layers)
    graph: Graph = one.profiled.graph
    if not compiled:
        costs = with_costs(one.profiled.lowering, estimate_costs(one.profiled.lowering, device))
        graph = replace(graph, operators=costs.operators)
    if meshes.titan(row):
        graph = meshes.meshed(graph, one.profiled.lowering.nodes, row, device)
    return one, graph, device


_NAMES: dict[str, str] = {}
"""Graph → the first row that has it."""


def _depth(row: Mapping[str, Any], layers: int) -> dict[str, float]:
    """Return what a depth takes: bytes and seconds of one micro-batch."""
    one, graph, device = _priced(row, layers)
    program = store_all(graph)
    if row.get("recompute") or _sharded(row):
        kept = "all" if row.get("sharding") == "gradients" else "none"
        program = meshes.published_step(graph, device, row.get("recompute", kept))
    time = replay(graph, program, device)
    made = _made_gradients(graph, program)
    share, flat = -1.0 * _gradients_stay(row), 0.0
    if row.get("whole_gradients"):
        share = one.sizes["blocks"] / made[-1]
        flat = flat_bytes(row, one.sizes["bytes"], one.sizes["blocks"], layers)
    peak = flat + max(a + share * b for a, b in zip(time.step_bytes, made, strict=True))
    resident = graph.resident_bytes
    library = 2 * row.get("workspace_bytes", 0) or cublas_workspace_bytes(device.name)
    library -= cublas_workspace_bytes(one.device.name)
    reserved = 0
    if _memory_of(row) == "peak_reserved_bytes":
        settings = AllocatorSettings(expandable_segments=expandable(row))
        reserved = reserved_by(graph, program, settings).reserved_peak_bytes - time.peak_bytes
    return {
        "activations": peak - resident,
        "library": resident - one.sizes["bytes"] + library,
        "parameters": one.sizes["bytes"],
        "trained": one.sizes["trained"],
        "fragments": max(0, reserved),
        "time": time.time_s + one.loss_s,
        **_times(graph, program),
        "exposed": _exposed_s(row, one, program, device),
    }


def _exposed_s(row: Mapping[str, Any], one: _Captured, program: Program, device: Device) -> float:
    """Return how long a program's products take beyond their roofline."""
    plain = replace(device, product_exposure=0.0)
    runs, nodes = Counter(run.op for _, run in program.computes), one.profiled.lowering.nodes
    found = 0.0
    for index, times in runs.items():
        target = one.profiled.graph.operators[index].target
        if "mm" in target and not isinstance(nodes[index].target, FusedKernel):
            whole, flat = (meshes.product_s(nodes[index], row, one) for one in (device, plain))
            found += times * (whole - flat)
    return found


def _times(graph: Graph, program: Program) -> dict[str, float]:
    found = dict.fromkeys(TIMES, 0.0)
    for _, run in program.computes:
        operator = graph.operators[run.op]
        product = any(word in operator.target for word in ("mm", "convolution"))
        kind = "attention" if "attention" in operator.target else "other"
        kind = "network" if operator.collective else "products" if product else kind
        found[kind] += operator.time_s
    return found


def _gradients_stay(row: Mapping[str, Any]) -> bool:
    """Whether gradients stay between micro-batches: they are there when a backward begins."""
    many = row["source"] == "megatron" or row.get("micro_batches", 1) > 1
    return many and not row.get("whole_gradients")


def _made_gradients(graph: Graph, program: Program) -> list[int]:
    """Return the bytes of finished gradients while each instruction runs: they are added to those
    that are there already."""
    made = [
        replace(one, begin=one.begin + 1)
        for one in lifetimes(graph, program).device
        if graph.tensors[one.tensor].kind is TensorKind.GRADIENT and one.stays
    ]
    return bytes_during(graph, made, len(program)) if made else [0] * len(program)


@dataclass(frozen=True)
class Row:
    """A published step and its estimate; 0 is what was not published.

    Attributes:
        memory, step: bytes, and seconds, published and estimated.
        parts: what the estimated bytes are.
        times: what one micro-batch's seconds are; "exposed" is a part of the products'.
    """

    name: str
    memory: tuple[float, float]
    step: tuple[float, float]
    parts: dict[str, float]
    times: dict[str, float]

    @property
    def source(self) -> str:
        return str(row_of(self.name)["source"])


def estimated(_: Any, name: str) -> list[Row]:
    """Return a row with its estimate."""
    row = row_of(name)
    shape = measurements().models[row["model"]]
    stages, sharded = row.get("pp", 1), _sharded(row)
    low, high = (3, 4) if sharded else (1, 2)
    deep = row.get("recompute") and not sharded and not _gradients_stay(row)
    if deep or row.get("whole_gradients"):
        low, high = shape["layers"] - 1, shape["layers"]
    a, b = _depth(row, low), _depth(row, high)

    def at(what: str, layers: float) -> float:
        return a[what] + (b[what] - a[what]) * (layers - low) / (high - low)

    own = shape["layers"] / stages
    if meshes.staged(row):
        own = float(meshes.stage_layers(row, 1))
    kept = own / row.get("virtual_stages", 1) * _in_flight(row, stages)
    trained = at("trained", own)
    states = row.get("dp", 1) * row.get("cp", 1) if row.get("sharding") == "optimizer" else 1
    parts = {
        "parameters": at("parameters", own),
        "gradients": 0.0,
        "state": trained * row["state_bytes"] / states,
        "activations": at("activations", kept),
        "library": at("library", own),
    }
    if _gradients_stay(row) and not sharded:
        parts["gradients"] = trained * DTYPES[row["gradients"]].itemsize
    elif row.get("dp", 1) > 1 and not row.get("sharding"):
        parts["buckets"] = trained * DTYPES[row["gradients"]].itemsize  # DDP's, a copy
    if _memory_of(row) == "peak_reserved_bytes":
        parts["fragments"] = b["fragments"] if expandable(row) else at("fragments", kept)
    if _memory_of(row) == "peak_reserved_bytes" and sharded:
        parts["streams"] = streams_bytes(row, b["trained"] - a["trained"], a["trained"], low)
    if meshes.staged(row):
        layer = b["trained"] - a["trained"]
        ranks = [
            {"activations": at("activations", meshes.layers_held(row, rank))}
            | meshes.stage_parts(row, layer, rank)
            for rank in (0, 1)
        ]
        parts |= max(ranks, key=lambda one: sum(one.values()))
    memory = float(row.get(_memory_of(row), 0)), sum(parts.values())
    times = {what: at(what, own) for what in TIMES}
    batch_s = at("time", own) + meshes.tensor_parallel_s(row, own, times["products"])
    step = _time_of(row), _step_s(row, batch_s, trained)
    return [Row(name, memory, step, parts, times)]


def _in_flight(row: Mapping[str, Any], stages: int) -> int:
    """Return the micro-batches whose activations the last stage holds, in parts of its layers:
    with interleaved stages those of earlier rounds, too (Megatron-LM, arXiv:2104.04473, 2.2), of so
    many micro-batches as go through a part at a time."""
    parts = row.get("virtual_stages", 1)
    rounds = (parts - 1) * row.get("chunk_group", stages) + 1
    return int(min(rounds, parts * row.get("micro_batches", 1)))


def _step_s(row: Mapping[str, Any], batch_s: float, trained: float) -> float:
    """Return the seconds of a step: micro-batches, the pipeline's fill, what data parallelism
    sends, and the update."""
    device, tensor = device_of(row), row.get("tp", 1)
    ranks = 1 if _sharded(row) else meshes.shards(row) if meshes.staged(row) else row.get("dp", 1)
    total = meshes.turns(row) * batch_s
    if ranks > 1:
        size = int(trained * DTYPES[row["gradients"]].itemsize)
        sent = Collective(CollectiveKind.ALL_REDUCE, ranks, size, tensor)
        total += device.collective_time_s(sent)
    moved = trained * (2 * row["state_bytes"] + 8) / (ranks if row.get("sharding") else 1)
    return total + moved / (device.memory_bytes_per_s * device.memory_fraction)
