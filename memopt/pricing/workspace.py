"""Estimates the workspace of a kernel call from its arguments.

On the CPU, workspace is the tensors that ATen's own code allocates besides its results, found by
measuring every call of fourteen model families with torch 2.13 (`benchmarks/estimate_accuracy.py`
compares again). oneDNN reorders the tensors of a convolution to its blocked layout: x', w', y'.
Forward, x' and w' live while y' is computed, then y' lives while it is reordered to y; backward, x'
and y' live while dw' is computed. Pointwise convolutions read tensors as they are; a strided
backward has two copies of dx. Only oneDNN's own scratchpads for 3-d convolutions on few planes are
known; without AVX-512 it has no kernel for the backward of 3-d convolutions whose depth is padded
either. An estimate for a CPU assumes the instructions of the machine that estimates.

On CUDA, workspace is what torch's sources tell:

- FlashAttention's backward sums dQ in float32 and keeps one number per row (flash_api.cpp,
  mha_bwd); the memory-efficient kernel's accumulators are taken to be the same;
- cuDNN's tensor-core convolutions work on channels-last data: contiguous half-precision images
  are transposed in workspace (NVIDIA, "Convolutional layers user guide", tensor layouts).
  What its heuristics take beyond that is not known without the hardware;
- the embedding's backward sorts the indices (Embedding.cu);
- cuBLAS holds one workspace per handle and stream to the end of the process: 32 MiB on Hopper,
  8.1 MiB before (CublasHandlePool.cpp). Handles belong to threads, and autograd's backward runs on
  its own, so a step has two. They are resident.

A random operator that runs again needs the generator's state: its first run saves the state, its
second run also saves the present one, to put it back. On the CPU torch hands out a state as a
tensor of its allocator, copied and dropped before the operator begins
(`memopt.executor.random_state`). So either the state or the operator's own workspace is live; the
larger counts. A CUDA generator's state is a tensor of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from memopt.models.graph import Graph, Implementation, Operator
from memopt.pricing.flops import elements, operator_name, padded, tensors_of
from memopt.step.backend import Backend
from memopt.step.signature import Signature, TensorArgument

Choice = TypeVar("Choice", Operator, Implementation)

_CHANNEL_BLOCK = 16
"""Channels per block of oneDNN's AVX-512 layout (nChw16c)."""
_PLAIN_CHANNELS = 8
"""oneDNN reads images of at most so many channels as they are."""
_KEYS_BLOCK = 512
_ALIGNMENT = 256
_HALF = (torch.float16, torch.bfloat16)


_BEFORE_HOPPER = ("P100", "V100", "T4", "A10", "A40", "A6000", "L4", "RTX30", "RTX40")


def cublas_workspace_bytes(device_name: str) -> int:
    """Return the bytes that cuBLAS keeps on a device for the threads of the forward and of the
    backward; for unknown devices the larger figure."""
    older = any(word in device_name.upper() for word in _BEFORE_HOPPER)
    return 2 * ((4096 * 2 + 16 * 8) * 1024 if older else 4096 * 8 * 1024)


def workspace_bytes(call: Signature, outputs: Any, *, cuda: bool) -> int:
    """Return the bytes that a call needs at its peak beyond its results."""
    name = operator_name(call.target)
    writes, reads = tensors_of(outputs), tensors_of((call.args, call.kwargs))
    if name in ("convolution", "convolution_backward"):
        return _convolution(name, call, writes, cuda)
    if name.startswith("_scaled_dot_product"):
        return _attention(name, call, cuda)
    if name in ("native_layer_norm", "native_layer_norm_backward"):
        return _layer_norm(name, reads)
    if cuda:
        return 32 * elements(reads[1]) if name == "embedding_dense_backward" else 0
    return _cpu(name, reads, writes)


def workspace_in_parts(call: Signature, outputs: Any, parts: int) -> int:
    """Return the bytes that a call needs on the CPU at its peak beside its results, if a
    convolution runs so many parts of its batch in turn."""
    if not operator_name(call.target).startswith("convolution") or parts == 1:
        return workspace_bytes(call, outputs, cuda=False)
    images = 2 if operator_name(call.target).endswith("backward") else 1
    args = (*(_part(one, parts) for one in call.args[:images]), *call.args[images:])
    made = outputs if images == 2 else _part(outputs, parts)
    return workspace_bytes(replace(call, args=args), made, cuda=False)


def _part(tensor: TensorArgument, parts: int) -> TensorArgument:
    batch, *rest = tensor.shape
    return replace(tensor, shape=(-(-batch // parts), *rest))


def _bytes(tensor: TensorArgument) -> int:
    return elements(tensor) * tensor.dtype.itemsize


def contiguous(tensor: TensorArgument) -> bool:
    """Return whether a tensor is row-major without gaps; strides of size-1 dimensions are free."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _dense(tensor: TensorArgument) -> int:
    """Return the bytes that `.contiguous()` allocates."""
    return 0 if contiguous(tensor) else _bytes(tensor)


def _cpu(name: str, reads: list[TensorArgument], writes: list[TensorArgument]) -> int:
    if name == "_native_batch_norm_legit_functional":
        return 2 * _bytes(writes[1])
    if name in ("native_batch_norm_backward", "native_dropout", "native_dropout_backward"):
        return _bytes(writes[0])
    if name == "_safe_softmax":
        # Masks of fully masked rows: one boolean per element and one per row.
        rows = elements(writes[0]) // max(1, writes[0].shape[-1])
        return elements(writes[0]) + rows
    if name == "cumsum" and reads[0].dtype != writes[0].dtype:
        return _bytes(writes[0])
    if name.endswith("_with_indices_backward"):
        return _dense(reads[0])
    return 0


def _layer_norm(name: str, reads: list[TensorArgument]) -> int:
    if not name.endswith("backward"):
        return _dense(reads[0])
    weight = reads[4] if len(reads) > 4 else None
    return _dense(reads[0]) + _dense(reads[1]) + (2 * _bytes(weight) if weight else 0)


def _blocked(tensor: TensorArgument) -> int:
    """Return the bytes in the blocked layout: channels are padded to the block."""
    channels = tensor.shape[1]
    return _bytes(tensor) // channels * padded(channels, _CHANNEL_BLOCK)


def _blocked_weight(weight: TensorArgument) -> int:
    """Return a blocked weight's bytes: channels are padded to the block, few input channels not."""
    out, inner = weight.shape[:2]
    if inner > _PLAIN_CHANNELS // 2:
        inner = padded(inner, _CHANNEL_BLOCK)
    return _bytes(weight) // math.prod(weight.shape[:2]) * padded(out, _CHANNEL_BLOCK) * inner


def _convolution(name: str, call: Signature, writes: list[TensorArgument], cuda: bool) -> int:
    """Return a convolution's workspace (either direction); x input, w weight, y output."""
    given: TensorArgument
    weight: TensorArgument
    result: TensorArgument
    if name == "convolution":
        given, weight, stride, padding = call.args[0], call.args[1], call.args[3], call.args[4]
        result, transposed = writes[0], call.args[6]
    else:
        result, given, weight = call.args[:3]
        stride, padding, transposed = call.args[4], call.args[5], call.args[7]
    if cuda:
        transposes = contiguous(given) and given.dtype in _HALF
        return _bytes(given) + _bytes(weight) + _bytes(result) if transposes else 0
    strided = math.prod(stride) > 1
    pointwise = math.prod(weight.shape[2:]) == 1 and set(padding) == {0}
    if pointwise and not strided:
        return 0
    # The window slides over this side.
    image, other = (result, given) if transposed else (given, result)
    plain = image.shape[1] <= _PLAIN_CHANNELS and weight.shape[1] > 1
    image_bytes, other_bytes = _bytes(image) if plain else _blocked(image), _blocked(other)
    weight_bytes = _blocked_weight(weight)
    padding_bytes = weight_bytes - _bytes(weight)
    if name == "convolution":
        return _forward(result, image_bytes, other_bytes, weight_bytes, transposed, plain) + (
            # The strided pointwise kernel gathers the points of one image.
            _bytes(given) // given.shape[0] // math.prod(stride)
            if pointwise and len(given.shape) == 4
            else 0
        )
    if len(weight.shape) == 5 and padding[0] > 0 and _multiplied(given, weight, padding):
        # By matrix products: copies of w and dw, and the columns of one plane of the result.
        columns = given.shape[1] * math.prod(weight.shape[2:]) * math.prod(result.shape[3:])
        return 4 * _bytes(weight) + columns * given.dtype.itemsize + _ALIGNMENT
    if weight.shape[1] == 1 and math.prod(weight.shape[2:]) > 9:
        return _bytes(given)
    if plain and not transposed and not call.args[10][0]:
        image_bytes = 0
    reordered = max(image_bytes + other_bytes + padding_bytes, weight_bytes)
    if strided and not transposed and weight.shape[1] > 1:
        reordered = max(reordered, 2 * image_bytes - _bytes(weight))
    return reordered + _dense(result)


def _multiplied(given: TensorArgument, weight: TensorArgument, padding: Sequence[int]) -> bool:
    """Return whether oneDNN has only matrix products for the backward of a 3-d convolution with a
    padded depth: where the padding reaches past the far side, and without AVX-512 wherever the
    window is more than one pixel wide."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if wide or math.prod(weight.shape[3:]) == 1:
        return bool(given.shape[2] <= weight.shape[2] - padding[0])
    return True


def _forward(
    result: TensorArgument,
    image_bytes: int,
    other_bytes: int,
    weight_bytes: int,
    transposed: bool,
    plain: bool,
) -> int:
    """Return the peak: x' and w' live while y' is computed, then y' while it is reordered to y."""
    if transposed:
        return max(other_bytes + weight_bytes + image_bytes - _bytes(result), 2 * _bytes(result))
    before = 0 if plain else image_bytes
    return max(before + weight_bytes + other_bytes - _bytes(result), other_bytes)


def _attention(name: str, call: Signature, cuda: bool) -> int:
    backward = name.endswith("backward")
    gradient: TensorArgument = call.args[0]
    query: TensorArgument
    key: TensorArgument
    query, key = call.args[1:3] if backward else call.args[:2]
    if cuda:
        if not backward:
            return 0
        rows = math.prod(query.shape[:-1])
        # FlashAttention's mha_bwd makes dK and dV for each query head, then sums up each group's.
        shared = key.shape[1] != query.shape[1]
        expanded = 2 * rows // query.shape[-2] * key.shape[-2] * query.shape[-1] * shared
        return 4 * elements(query) + 4 * rows + expanded * query.dtype.itemsize
    # FlashAttentionKernel.cpp: scores of one block of queries and keys, for each thread.
    queries = query.shape[-2]
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32
    block, keys = min(block, queries), min(_KEYS_BLOCK, key.shape[-2])
    threads = torch.get_num_threads()
    if not backward:
        return 4 * threads * block * (keys + 2 + query.shape[-1])
    transposed = replace(
        gradient,
        shape=tuple(gradient.shape[i] for i in (0, 2, 1, 3)),
        stride=tuple(gradient.stride[i] for i in (0, 2, 1, 3)),
    )
    copied = 0 if contiguous(transposed) or contiguous(gradient) else _bytes(gradient)
    return copied + 4 * threads * (2 * block * keys + block)


def with_state(graph: Graph, backend: Backend, *, placed: bool = False) -> Graph:
    """Charge the generator's state as workspace to random operators that may run again.

    Args:
        graph: the priced graph.
        backend: where the step runs.
        placed: whether results lie in an arena, which is allocated before they are.
    """
    if not backend.on_host:
        return graph
    state_bytes = torch.Generator().get_state().nbytes

    def charged(one: Choice, writes: Sequence[int]) -> Choice:
        results_bytes = 0 if placed else sum(graph.tensors[t].size_bytes for t in writes)
        return replace(one, workspace_bytes=max(one.workspace_bytes, state_bytes - results_bytes))

    operators = list(graph.operators)
    for index, one in enumerate(operators):
        if one.random and one.recomputable:
            choices = [
                charged(c, one.writes if c.writes is None else c.writes)
                for c in one.implementations
            ]
            operators[index] = replace(charged(one, one.writes), implementations=tuple(choices))
    return replace(graph, operators=tuple(operators))
