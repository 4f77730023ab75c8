"""Counts the work of a kernel call from its arguments alone: operations, bytes and kind.

Operations are floating-point operations for matrix products, convolutions and attention (a
multiply-add counts as two). Some other kinds count elements (pooling: times window elements); only
a calibrated device knows their rates (`memopt.measure_device`). Without a rate memory alone bounds
a kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from memopt.step.signature import Signature, TensorArgument
from memopt.torch_private import pytree
from memopt.torch_private.operators import schema_of

MATMUL, CONVOLUTION, ATTENTION = "", "convolution", "attention"

_INNER_TILE, _OUTER_TILE = 32, 8
"""A product's dimensions are padded to the kernels' tiles: an outer product (inner dimension 2)
takes as long as one with 32 (measured, MKL and oneDNN; GPU tiles are no smaller)."""

_ROW_BYTES = 16
"""What tensor cores' kernels load at once: a row that does not begin there takes other kernels."""

_MATMULS = {"mm", "addmm", "bmm", "baddbmm"}

_ELEMENT_KINDS = {
    **dict.fromkeys(("native_dropout", "bernoulli", "rand_like"), "random"),
    "tanh": "tanh",
    **dict.fromkeys(("_safe_softmax", "_softmax", "_log_softmax"), "softmax"),
    **dict.fromkeys(("exp", "log", "erf", "sin", "cos", "sigmoid", "mish"), "activation"),
    **dict.fromkeys(("silu", "silu_backward", "gelu", "gelu_backward"), "activation"),
    "_native_batch_norm_legit_functional": "batch norm",
    "native_batch_norm_backward": "batch norm backward",
    "native_group_norm": "batch norm",
    "native_group_norm_backward": "batch norm backward",
    "native_layer_norm": "layer norm",
    "native_layer_norm_backward": "layer norm backward",
    "max_pool2d_with_indices_backward": "pool backward",
    "max_pool3d_with_indices_backward": "pool backward",
    "embedding_dense_backward": "scatter",
}
_POOLS = {"max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool2d_backward"}

_CALLS = {
    "convolution": 5,
    "convolution_backward": 8,
    "_native_batch_norm_legit_functional": 5,
    "native_batch_norm_backward": 3,
    "native_layer_norm": 2,
    "native_layer_norm_backward": 3,
    "native_dropout": 4,
    "native_dropout_backward": 3,
    "_safe_softmax": 5,
    "embedding_dense_backward": 3,
    "index": 3,
    "sum": 2,
    "mean": 2,
    "cat": 2,
    "slice_backward": 2,
    "select_backward": 2,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 6,
}
"""Approximate launches inside one operator: its own kernels and the allocations between them."""


@dataclass(frozen=True)
class Work:
    """The work of one kernel call.

    Attributes:
        kind: names the device's rate that bounds it: "" for matrix products, else "convolution",
            "attention", "softmax"...
        dtype: of the first floating-point tensor, for example "float32"; "" if there is none.
        operations: counted as the module's docstring says.
        moved_bytes: every distinct tensor read once and written once.
        calls: kernel launches.
        aligned: whether every row that a matrix product reads or writes begins at 16 bytes.
    """

    kind: str
    dtype: str
    operations: float
    moved_bytes: int
    calls: int = 1
    aligned: bool = True


def operator_name(target: Any) -> str:
    """Return an operator's short name: `aten.mm.default` → "mm"."""
    return str(target).split(".")[1] if str(target).count(".") else str(target)


def tensors_of(value: Any) -> list[TensorArgument]:
    """Return the tensor arguments in nested lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TensorArgument)]


def elements(tensor: TensorArgument) -> int:
    """Return the number of elements."""
    return math.prod(tensor.shape)


def touched_bytes(tensor: TensorArgument) -> int:
    """Return the bytes that a view reads, at most its storage (expanded dimensions count once)."""
    distinct = math.prod(n for n, s in zip(tensor.shape, tensor.stride, strict=True) if s != 0)
    return min(distinct * tensor.dtype.itemsize, tensor.storage_bytes)


def work(call: Signature, outputs: Any) -> Work:
    """Count the work of a call."""
    name = operator_name(call.target)
    reads, writes = tensors_of((call.args, call.kwargs)), tensors_of(outputs)
    floating = [t.dtype for t in (*reads, *writes) if t.dtype.is_floating_point]
    dtype = str(floating[0]).removeprefix("torch.") if floating else ""
    kind, operations = _operations(name, call, reads, writes)
    return Work(
        kind=kind,
        dtype=dtype,
        operations=operations,
        moved_bytes=_moved(name, reads, writes),
        calls=_CALLS.get(name, 1),
        aligned=name not in _MATMULS or _aligned(*call.args[-2:]),
    )


def _moved(name: str, reads: list[TensorArgument], writes: list[TensorArgument]) -> int:
    written = sum(map(touched_bytes, writes))
    if name == "embedding" or name.startswith("index") or name == "gather":
        # Only the rows that the indices name are read from the table.
        return 2 * written + sum(touched_bytes(t) for t in reads[1:])
    if name.startswith(("empty", "new_empty")):
        return 0
    distinct = {(t.storage_bytes, t.offset, t.shape, t.stride, i): t for i, t in enumerate(reads)}
    return written + sum(map(touched_bytes, distinct.values()))


def _operations(
    name: str, call: Signature, reads: list[TensorArgument], writes: list[TensorArgument]
) -> tuple[str, float]:
    if name in _MATMULS:
        return MATMUL, _matmul(*call.args[-2:])
    if name in ("convolution", "convolution_backward"):
        return _convolution(name, call, writes)
    if name.startswith("_scaled_dot_product"):
        return _attention(name, call)
    if name in _POOLS:
        window = math.prod(call.args[2 if name.endswith("backward") else 1])
        gridded = reads[0] if name.endswith("backward") else writes[0]
        return "pool", float(elements(gridded) * window)
    if name in _ELEMENT_KINDS:
        largest = max(map(elements, (*reads[:1], *writes[:1])), default=0)
        return _ELEMENT_KINDS[name], float(largest)
    return "element", 0.0


def padded(size: int, tile: int) -> int:
    """Round a size up to whole tiles."""
    return -(-size // tile) * tile


def _matmul(left: TensorArgument, right: TensorArgument) -> float:
    batch = math.prod(left.shape[:-2])
    rows, inner = left.shape[-2:]
    return (
        2.0
        * batch
        * padded(rows, _OUTER_TILE)
        * padded(inner, _INNER_TILE)
        * padded(right.shape[-1], _OUTER_TILE)
    )


def _aligned(left: TensorArgument, right: TensorArgument) -> bool:
    """Whether the rows of a product's factors and of its result begin at multiples of 16 bytes."""
    rows = [max(t.stride[-2:]) * t.dtype.itemsize for t in (left, right)]
    rows.append(right.shape[-1] * right.dtype.itemsize)
    return not any(row % _ROW_BYTES for row in rows)


def _convolution(name: str, call: Signature, writes: list[TensorArgument]) -> tuple[str, float]:
    """Count 2 · outputs · (input channels of a group · window), for each result of the backward.

    A transposed convolution's forward is an ordinary convolution's backward: its inputs count.
    """
    if name == "convolution":
        given, weight, transposed, groups = call.args[0], call.args[1], call.args[6], call.args[8]
        gridded, results = (given if transposed else writes[0]), 1
    else:
        gradient, given, weight = call.args[:3]
        transposed, groups, mask = call.args[7], call.args[9], call.args[10]
        gridded, results = (given if transposed else gradient), sum(map(bool, mask[:2]))
    depthwise = groups > 1 and weight.shape[1] < 4
    kind = "depthwise" if depthwise else CONVOLUTION
    if depthwise and name != "convolution":
        kind = "depthwise backward"
    return kind, 2.0 * elements(gridded) * math.prod(weight.shape[1:]) * results


def _attention(name: str, call: Signature) -> tuple[str, float]:
    """Count two products of 2·B·H·S·S'·D forward, five backward (the scores again, then dV, dP, dQ,
    dK); half of them for causal kernels, which skip masked scores."""
    backward = name.endswith("backward")
    query, key = call.args[1:3] if backward else call.args[:2]
    product = 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1]
    operations = product * (5 if backward else 2)
    return ATTENTION, operations / 2 if _causal(call) else operations


def _causal(call: Signature) -> bool:
    """Return `is_causal`, given by position or by name."""
    schema = [a.name for a in schema_of(call.target).arguments]
    position = schema.index("is_causal") if "is_causal" in schema else None
    if position is not None and position < len(call.args):
        return bool(call.args[position])
    return bool(call.kwargs.get("is_causal", False))
