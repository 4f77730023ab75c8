"""The GPUs of the published rows, and torchtitan's steps: pipelines, tensor and context parallelism
and float8 as a row was run, what runs again in them, and what FSDP and torch's allocator hold
beside a step's own tensors.

Read in torchtitan's sources at the commit that its report names (9dec370): FSDP spreads over data
and context; rows of a sequence are spread over the ranks of tensor parallelism between products
(parallelize_llama.py); a pipeline's weights are gathered once a step, and its micro-batches are as
many as its ranks (pipelining_utils.py). Rates are the specifications'; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.published import measurements
from memopt.api.mesh_search import ring_s
from memopt.models import mesh
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.models.presets import find_device
from memopt.passes.early_collectives import with_early_collectives
from memopt.pricing.flops import MATMUL, elements, tensors_of, work
from memopt.pricing.roofline import work_time_s
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.reductions.block_checkpoints import forward_of_blocks, largest_sent_bytes, run_again
from memopt.step.kernel import FusedKernel
from memopt.step.signature import describe_value, signature

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of a row, by name."""
_A100, _H100 = find_device("A100"), find_device("H100")
DEVICES: dict[str, Device] = {
    **{name: find_device(name) for name in ("H100", "H200", "GB200")},
    "A100-80GB": _A100,
    "A100-40GB": replace(_A100, name="A100-SXM-40GB", memory_bytes_per_s=1555e9),
    "A100-40GB-PCIe": replace(_A100, name="A100-PCIe-40GB", memory_bytes_per_s=1555e9),
    "H100-96GB-500W": replace(
        _H100,
        name="H100-96GB-500W",
        capacity_bytes=int(93.6 * 2**30),
        memory_bytes_per_s=2400e9,
        flops_fraction=0.78,
        memory_fraction=0.92,
        source="torchtitan's description of its machines; shares of the rates as in torchao's",
    ),
}
"""torchtitan's H100s have HBM2e and 500 W. torchao's roofline of them (float8/roofline_utils.py)
has 92% of the memory's rate, and of 989 tera-operations per second 78% (d8af7d7, March 2025)."""
_FIRST_FLASH = 0.325 / 0.62
"""What the first FlashAttention reaches of the second's rate: 25 to 40% of an A100's arithmetic
beside 50 to 73% (arXiv:2307.08691, abstract; the presets have 62%)."""
MEMORY_ONLY = {"A10G": replace(_A100, name="A10G")}
"""GPUs whose times nobody published: only peaks are estimated."""
ALL_DEVICES = DEVICES | MEMORY_ONLY


def device_of(row: Mapping[str, Any]) -> Device:
    """Return the GPU, with the rate of the attention kernel that the row was run with."""
    device = ALL_DEVICES[row["gpu"]]
    if row.get("attention") != "first flash":
        return device
    slower = {k: v * _FIRST_FLASH for k, v in device.flops_per_s.items() if "attention" in k}
    return replace(device, flops_per_s={**device.flops_per_s, **slower})


def titan(row: Mapping[str, Any]) -> bool:
    """Whether torchtitan ran the row."""
    return bool(row["source"].startswith("torchtitan"))


def staged(row: Mapping[str, Any]) -> bool:
    """Whether the row is a pipeline whose parameters FSDP spreads, and gathers once a step."""
    return row.get("pp", 1) > 1 and row.get("sharding") == "parameters"


def shards(row: Mapping[str, Any]) -> int:
    """Return over how many ranks FSDP spreads: its mesh is of data and of context."""
    return int(row.get("dp", 1) * row.get("cp", 1))


def _sent_itemsize(row: Mapping[str, Any]) -> int:
    """Return the bytes of a product's input on the network: float8 with one scale for a tensor
    goes over it as it is."""
    return 1 if row.get("dtype") == "float8" and row.get("scaling") != "rowwise" else 2


def gathered_itemsize(row: Mapping[str, Any]) -> int:
    """Return the bytes of a layer's gathered element. Without data parallelism beside a context
    torchtitan gathers in bfloat16 (`dp_shard_enabled` in its float8.py)."""
    return _sent_itemsize(row) if row.get("dp", 1) > 1 else 2


def stage_layers(row: Mapping[str, Any], rank: int) -> int:
    """Return the layers of a pipeline's rank: what is left over goes to the stages between the
    first and the last, one each (torchtitan's generate_split_points)."""
    stages = row["pp"] * row.get("virtual_stages", 1)
    base, more = divmod(measurements().models[row["model"]]["layers"], stages)
    return sum(base + (0 < one <= more) for one in range(rank, stages, row["pp"]))


def stage_parts(row: Mapping[str, Any], layer: float, rank: int) -> dict[str, float]:
    """Return what a rank of a `staged` row holds of its parameters, in bytes.

    Gathered weights stay, and whole gradients in float32, from the first micro-batch's backward to
    the last one's. With no more micro-batches than ranks, a rank ends one of its virtual stages
    before it begins the next one's backward: only one's gradients are whole. A layer's new ones
    are cast before they are added. What is received stays for all micro-batches, and results
    (torch's stage.py). FSDP's streams keep two layers' gathers and all reduced gradients, whose
    memory no other stream takes (torch's _fsdp_collectives.py).

    Args:
        layer: parameters of a layer on one rank of tensor parallelism.
        rank: of the pipeline, not the last.
    """
    shape, ranks, layers = measurements().models[row["model"]], shards(row), stage_layers(row, rank)
    parts = row.get("virtual_stages", 1)
    virtual = parts if row["micro_batches"] <= row["pp"] else 1
    tokens = row["batch"] * row["sequence"] // row.get("cp", 1) // row.get("tp", 1)
    table = shape["vocabulary"] * shape["hidden"] / row.get("tp", 1) * (rank == 0)
    held, width = table + layers * layer, gathered_itemsize(row)
    buffers = 2 * row["micro_batches"] * parts
    if rank:  # Received inputs are among the layers' inputs while they are needed.
        buffers += row["micro_batches"] * parts - in_flight(row, rank)
    return {
        "parameters": 4 * held / ranks,
        "state": row["state_bytes"] * held / ranks,
        "gathered": 2 * table + width * layers * layer,
        "gradients": 4 * (held / virtual + layer),
        "sent": 2.0 * buffers * tokens * shape["hidden"],
        "context": float(_keys_bytes(row) if row.get("cp", 1) > 1 else 0),
        "streams": 2 * table + 2 * width * layer + 4 * held / ranks,
    }


def in_flight(row: Mapping[str, Any], rank: int) -> int:
    """Return the micro-batches that a rank of a `staged` row holds, times its virtual stages
    (torch's schedules: 1F1B, and interleaved, arXiv:2104.04473)."""
    parts = row.get("virtual_stages", 1)
    return mesh.in_flight(row["pp"], row["micro_batches"], rank, parts)


def turns(row: Mapping[str, Any]) -> float:
    """Return how many micro-batches' time a step takes: its own, and those that fill a pipeline."""
    parts = row.get("virtual_stages", 1)
    return mesh.pipeline_turns(row.get("pp", 1), row.get("micro_batches", 1), parts)


def layers_held(row: Mapping[str, Any], rank: int) -> float:
    """Return the layers whose inputs a rank of a `staged` row holds, of all its micro-batches."""
    return stage_layers(row, rank) / row.get("virtual_stages", 1) * in_flight(row, rank)


def _keys_bytes(row: Mapping[str, Any]) -> int:
    """Return the bytes of a layer's keys and values of a whole sequence, repeated for its heads."""
    width = measurements().models[row["model"]]["hidden"] // row.get("tp", 1)
    return int(2 * 2 * row["batch"] * row["sequence"] * width)


def meshed(graph: Graph, nodes: Any, row: Mapping[str, Any], device: Device) -> Graph:
    """Return one rank's graph with the times of its mesh: float8 products, attention to the keys of
    the whole context, and FSDP's collectives between the groups of tensor parallelism."""
    pairs = zip(graph.operators, nodes, strict=True)
    found = [_meshed(operator, node, row, device) for operator, node in pairs]
    return replace(graph, operators=tuple(found))


def _meshed(operator: Operator, node: Any, row: Mapping[str, Any], device: Device) -> Operator:
    tensor, context = row.get("tp", 1), row.get("cp", 1)
    float8 = row.get("dtype") == "float8"
    if operator.collective is not None:
        sent = replace(operator.collective, stride=tensor)
        if float8 and sent.kind == CollectiveKind.ALL_GATHER:
            sent = replace(sent, size_bytes=sent.size_bytes * gathered_itemsize(row) // 2)
        return replace(operator, collective=sent, time_s=device.collective_time_s(sent))
    if "attention" in operator.target and context > 1:
        back, size = "backward" in operator.target, _keys_bytes(row)
        compiled = row.get("kernels") == "compiled"
        time_s = ring_s(operator.time_s, size, context, tensor, back, device, compiled)
        return replace(operator, time_s=time_s)
    fused = isinstance(node.target, FusedKernel)
    if not float8 or fused or work(signature(node), describe_value(node)).kind != MATMUL:
        return operator
    return replace(operator, time_s=product_s(node, row, device))


def product_s(node: Any, row: Mapping[str, Any], device: Device) -> float:
    """Return a matrix product's seconds. In float8 it is twice as fast as in bfloat16 (data sheets
    of H100 and H200), and its activations are cast: two bytes read, twice one written or, with
    a scale for each row, in one order, copied in the other, and cast once more (torchao's
    roofline_utils.py). The head's products stay as they are (torchtitan's filter of modules)."""
    call = signature(node)
    done, read = work(call, describe_value(node)), tensors_of(call.args)
    words = -(-measurements().models[row["model"]]["vocabulary"] // row.get("tp", 1))
    if row.get("dtype") != "float8" or any(words in one.shape for one in read):
        return work_time_s(done, device)
    rates = {**device.flops_per_s, "float8": 2 * device.flops_per_s["bfloat16"]}
    fast = replace(device, flops_per_s=rates)
    moved = done.moved_bytes - sum(map(elements, read))
    time_s = work_time_s(replace(done, dtype="float8", moved_bytes=moved), fast)
    rows = row["sequence"] // row.get("cp", 1) * row["batch"]
    cast = elements(read[0]) if read[0].shape[0] == rows else 0
    each = 6 if row.get("scaling") == "rowwise" else 4
    return time_s + each * cast / (device.memory_bytes_per_s * device.memory_fraction)


def tensor_parallel_s(row: Mapping[str, Any], layers: float, products_s: float) -> float:
    """Return the seconds that tensor parallelism's collectives add to a micro-batch.

    A layer's activations are summed in its forward and its backward, twice each. Where rows of a
    sequence are spread, a sum is a gather before a product and a scatter after one; recomputing
    repeats the gathers, and the first scatter if it keeps none. Products' inputs are sent in
    float8. Asynchronous ones hide behind the products, but for the first of `tp` parts; gathers of
    float8 with scales of rows do not (github.com/pytorch/pytorch/issues/149990).
    """
    device, tensor = device_of(row), row.get("tp", 1)
    if tensor == 1:
        return 0.0
    tokens = row["sequence"] // row.get("cp", 1) * row["batch"]
    size = tokens * measurements().models[row["model"]]["hidden"] * 2

    def seconds(kind: CollectiveKind, size: int) -> float:
        return layers * device.collective_time_s(Collective(kind, tensor, size))

    if not row.get("sequence_parallel"):
        return 4 * seconds(CollectiveKind.ALL_REDUCE, size)
    again = row.get("recompute", "")
    gathered_s = (4 + 2 * bool(again)) * seconds(
        CollectiveKind.ALL_GATHER, size * _sent_itemsize(row) // 2
    )
    sent_s = (4 + (again == "full")) * seconds(CollectiveKind.REDUCE_SCATTER, size)
    if not row.get("overlapped_tensor_parallel"):
        return gathered_s + sent_s
    alone_s = gathered_s if row.get("scaling") == "rowwise" else 0.0
    sent_s += gathered_s - alone_s
    return alone_s + sent_s / tensor + max(0.0, sent_s * (1 - 1 / tensor) - products_s)


def published_step(graph: Graph, device: Device, recompute: str) -> Program:
    """Make torchtitan's step, on the graph of one rank.

    Every block is checkpointed: its backward begins with its forward again, whose weights are
    gathered again, but for those of the last block. Selective checkpointing keeps the results of
    attention and of every second matrix product of a block. Collectives start early, in the memory
    that one more block takes on the network: FSDP2 prefetches the next block, and holds what it
    scatters until that is over.

    Args:
        graph: of a decoder of `benchmarks.published.decoder`, sharded by `memopt.shard`.
        device: its link rates.
        recompute: "full", "selective", "none": only weights are gathered again, or "all": nothing.
    """
    blocks = forward_of_blocks(graph)
    last = list(blocks)[-1]
    again = {
        name: set(members) - _kept(graph, members, recompute, name == last)
        for name, members in blocks.items()
    }
    program = run_again(graph, again)
    room_bytes = replay(graph, program, device).peak_bytes + largest_sent_bytes(graph)
    return with_early_collectives(graph, program, room_bytes, device)


def _kept(graph: Graph, members: Iterable[int], recompute: str, last: bool) -> set[int]:
    """Find the forward operators of a block whose results stay for its backward."""
    if recompute == "all":
        return set(members)
    kept: set[int] = set()
    products = 0
    for index in members:
        operator = graph.operators[index]
        gathers = operator.collective is not None
        product = "aten.mm" in operator.target
        products += product
        saved = "scaled_dot_product" in operator.target or (product and products % 2 == 1)
        saved = saved if recompute == "selective" else recompute == "none" and not gathers
        if saved or (last and gathers):
            kept.add(index)
    return kept


def expandable(row: Mapping[str, Any]) -> bool:
    """Whether the allocator has segments that grow, as torchtitan asks in its run_train.sh. They
    have holes that larger tensors do not fit in, but as many however deep the model is."""
    return titan(row)


def streams_bytes(row: Mapping[str, Any], layer: float, shallow: float, layers: int) -> float:
    """Return what FSDP2 holds beside a step's own tensors, by torch's _fsdp_collectives.py.

    It gathers on one stream and reduces on another, whose cached blocks no other stream takes: the
    tables' and two layers' gathered weights, and all gradients, which are gone when the next step's
    activations are largest. Embedding and head are one group, whole from forward to backward.

    Args:
        layer, shallow: one rank's parameters of a layer, and of a model of so many layers.
    """
    ranks, depth = shards(row), measurements().models[row["model"]]["layers"]
    tables = shallow - layers * layer
    gathered = ranks * (2 * tables + 2 * gathered_itemsize(row) * layer)
    reduced = DTYPES[row["gradients"]].itemsize * (tables + depth * layer)
    return gathered + ranks * tables + reduced


def flat_bytes(row: Mapping[str, Any], parameters: int, blocks: int, layers: int) -> float:
    """Return what FSDP1 holds beside a block's work and all blocks' gradients.

    Its root stays gathered from the forward on (`_post_forward_reshard`); a flat parameter's
    gradient is a concatenation with zeros for what is frozen (torch's `split_with_sizes_backward`).

    Args:
        parameters, blocks: bytes of one rank's parameters, and of all `layers` blocks' whole ones.
    """
    return float(parameters * row.get("dp", 1) - blocks * (1 - 1 / layers))
