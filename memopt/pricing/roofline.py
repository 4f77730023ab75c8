"""Roofline times of operators, for a device that need not be present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memopt.models.device import Device
from memopt.pricing.cache import Cost
from memopt.pricing.flops import (
    ATTENTION,
    CONVOLUTION,
    MATMUL,
    Work,
    elements,
    operator_name,
    tensors_of,
    work,
)
from memopt.pricing.workspace import workspace_bytes
from memopt.step.build import Lowering
from memopt.step.kernel import FusedKernel
from memopt.step.signature import Signature, describe_value, signature


def work_time_s(done: Work, device: Device) -> float:
    """Return the time of one call on a device in seconds, its launches included: a roofline, and
    for matrix products what the device's `product_exposure` adds to it."""
    moved_s = done.moved_bytes / (device.memory_bytes_per_s * device.memory_fraction)
    rate = _rate(done, device) if done.operations else None
    computed_s = done.operations / rate if rate else 0.0
    exposed_s = device.product_exposure * min(moved_s, computed_s) if done.kind == MATMUL else 0.0
    return done.calls * device.launch_latency_s + max(moved_s, computed_s) + exposed_s


def _fused_time_s(parts: Sequence[Work], device: Device) -> float:
    """Return a fused kernel's roofline time: its launches, then the longer of moving and
    computing."""
    computed_s = moved_s = latency_s = 0.0
    for part in parts:
        launch_s = part.calls * device.launch_latency_s
        time_s = work_time_s(part, device) - launch_s
        latency_s += launch_s
        if part.moved_bytes:
            moved_s += time_s
        else:
            computed_s += time_s
    return latency_s + max(moved_s, computed_s)


def _rate(done: Work, device: Device) -> float | None:
    rates = device.flops_per_s
    special = rates.get(f"{done.dtype} {done.kind}") if done.kind else None
    if special is not None:
        return special
    if done.kind not in _DENSE_KINDS:
        return None
    dtype = done.dtype
    if done.kind == CONVOLUTION and dtype == "float32" and "tfloat32" in rates:
        # torch lets cuDNN use TF32 by default, but not cuBLAS.
        dtype = "tfloat32"
    if dtype not in rates:
        known = ", ".join(name for name in rates if " " not in name) or "none"
        raise ValueError(
            f"the device {device.name!r} has no flops_per_s for {dtype!r} (it has: {known}), which "
            "the model computes in; add it to the Device or change the model's dtype"
        )
    rate = rates[dtype] * device.flops_fraction
    halves = device.rules == "cuda" and dtype in ("bfloat16", "float16")
    return rate if done.aligned or not halves else _UNALIGNED * rate


_UNALIGNED = 0.4
"""Share of the rate that half precision reaches in products whose rows begin anywhere: nanoGPT
gained 25% from padding 50,257 tokens to 50,304, "LLMs from scratch" 14%. Fitted to the latter's
steps (docs/results/published.md)."""


def estimate_costs(
    lowering: Lowering, device: Device, regions: Mapping[str, Sequence[Work]] | None = None
) -> list[Cost]:
    """Return roofline time, workspace and result sizes of every operator of a lowering. Collectives
    get their time on the network; `regions` maps keys of fused kernels to their work."""
    cuda = device.rules == "cuda"
    known: dict[str, Cost] = {}
    costs = []
    for node, operator in zip(lowering.nodes, lowering.graph.operators, strict=True):
        call, outputs = signature(node), describe_value(node)
        if call.text not in known and operator.collective is not None:
            network_s = device.collective_time_s(operator.collective)
            known[call.text] = Cost(network_s, 0, _result_bytes(call, outputs, device))
        elif call.text not in known and isinstance(node.target, FusedKernel):
            time_s = _fused_time_s((regions or {})[node.target.key], device)
            results = _result_bytes(call, outputs, device)
            known[call.text] = Cost(time_s, node.target.workspace_bytes, results)
        elif call.text not in known:
            known[call.text] = Cost(
                work_time_s(work(call, outputs), device),
                workspace_bytes(call, outputs, cuda=cuda),
                _result_bytes(call, outputs, device),
            )
        costs.append(known[call.text])
    return costs


def _result_bytes(call: Signature, outputs: Any, device: Device) -> tuple[int, ...]:
    """Return storage sizes as the device's allocator counts them.

    Some losses return their number in the storage of the elements they summed up.
    CUDA's attention saves the logarithm of the scores' sums as float32, its rows padded to 32 by
    the memory-efficient kernel, and the random generator's seed and offset.
    """
    found = tensors_of(outputs)
    sizes = [t.storage_bytes for t in found]
    name = operator_name(call.target)
    if name in _SUMMED_IN_PLACE:
        summed = max(map(elements, tensors_of(call.args)))
        sizes[0] = max(sizes[0], summed * found[0].dtype.itemsize)
    if device.rules == "cuda" and name == _FLASH_FORWARD:
        batch, heads, rows = found[1].shape
        sizes[1] = 4 * batch * heads * (-(-rows // _ROWS_TILE) * _ROWS_TILE) + _PHILOX_BYTES
    return tuple(device.allocated_bytes(size) for size in sizes)


_DENSE_KINDS = (MATMUL, CONVOLUTION, ATTENTION, "depthwise", "depthwise backward")


_SUMMED_IN_PLACE = {
    "mse_loss",
    "smooth_l1_loss",
    "binary_cross_entropy",
    "soft_margin_loss",
}
"""Losses that real kernels, unlike fake ones, return in the summed storage (found by running every
loss of torch.nn.functional in torch 2.13; measured `Cost.output_bytes` are real)."""


_FLASH_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


_PHILOX_BYTES = 1024
"""Seed and offset of CUDA's attention, one block of 512 bytes each."""


_ROWS_TILE = 32
