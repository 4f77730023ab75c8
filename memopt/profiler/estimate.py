"""Estimates a step on absent hardware: a roofline time for every operator of a fake capture.

    time = calls · launch latency + max(operations / rate, bytes / memory bandwidth)

where `flops.work` gives operations, bytes and calls. The rate is the device's `flops_per_s` entry
"dtype kind" ("bfloat16 attention", "float32 softmax"), an achieved rate. Without it, matrix
products, convolutions and attention have the dtype's entry times `flops_fraction`; memory alone
bounds the other kinds.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from memopt.capture.capture import capture
from memopt.capture.fake import Fakes, fused_attention
from memopt.capture.training_call import training_call
from memopt.kernels.compiled.choice import check_kernels
from memopt.kernels.compiled.fuse import planned_regions
from memopt.models.device import Device
from memopt.models.garbage import full_collections_deferred
from memopt.models.graph import Graph
from memopt.models.progress import Progress
from memopt.pricing.baseline import LARGEST_NUMBER_BYTES, LossUse, OutputTree, cut_output
from memopt.pricing.flops import (
    operator_name,
)
from memopt.pricing.measure import with_costs
from memopt.pricing.roofline import _FLASH_FORWARD, estimate_costs
from memopt.pricing.workspace import cublas_workspace_bytes, with_state
from memopt.profiler.session import with_resident
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.backend import estimated_backend
from memopt.step.build import build
from memopt.step.captured import Captured
from memopt.step.dropped_outputs import unread
from memopt.step.inputs import Call
from memopt.step.loss import Loss
from memopt.step.memory_layout import is_dense
from memopt.step.model_outputs import gradients_of
from memopt.step.optimizer_state import optimizer_state
from memopt.step.profiled import Baseline, Profiled
from memopt.step.record import record_of
from memopt.torch_private.access import patched
from memopt.user_code.aside import aside


@aside
@full_collections_deferred()
def estimate_model(
    model: nn.Module,
    inputs: Any,
    device: Device,
    *,
    loss: Loss | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    kernels: str = "aten",
    progress: Progress | None = None,
) -> Profiled:
    """Capture a model with fake tensors and price its step for a device.

    Nothing is computed and no parameter is copied; the model may be on meta.

    Args:
        model: the module, in the mode to train it in.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        device: the device to price for; CUDA's rules apply if its `block_bytes` is above 1.
        loss: the user's loss; its memory is charged at the loss boundary, and outputs that it does
            not use get no gradient.
        optimizer: its state is resident: a name or an instance; see `optimizer_state`.
        kernels: "aten"; "compiled" or "auto" for regions priced as fused kernels; "tiled".
        progress: called with (fraction, what).

    Returns:
        A Profiled whose baseline is replayed and whose call holds the user's inputs.

    Raises:
        CaptureError, ValueError: see `capture`, `to_call`, `work_time_s`.
    """
    report = progress or (lambda _fraction, _what: None)
    check_kernels(kernels)
    report(0.0, "capturing the model with fake tensors")
    backend = estimated_backend(device.block_bytes, device.kind)
    cuda = device.rules == "cuda"
    call, fakes = training_call(model, inputs), Fakes()
    stand_in, fake_call = fakes.model(model), fakes.call(call)
    used = cache(lambda: _loss_use(fakes, stand_in, fake_call, loss, device) if loss else LossUse())
    notes: list[str] = []
    with contextlib.ExitStack() as as_cuda:
        if cuda:
            as_cuda.enter_context(fused_attention())
            notes = as_cuda.enter_context(autocast_for_cuda())
        captured = capture(stand_in, fake_call, lambda: used().gradients)
        loss_use = used()
    lowering = build(stand_in, captured, device.block_bytes)
    notes = [*_notes(captured, device), *notes]
    made, regions = planned_regions(stand_in, captured, lowering, kernels, device.block_bytes)
    captured, lowering = made.captured, made.lowering
    report(0.8, f"pricing operators for {device.name}")
    graph = with_state(with_costs(lowering, estimate_costs(lowering, device, regions)), backend)
    state = optimizer_state(optimizer, model.parameters(), device.block_bytes)
    more_bytes = state.bytes_total + loss_use.kept_bytes + backend.step_scalars_bytes
    if cuda:
        more_bytes += cublas_workspace_bytes(device.name)
    graph = with_resident(graph, more_bytes, loss_use.boundary_bytes)
    timeline = replay(graph, store_all(graph))
    cpu = torch.device("cpu")
    record = record_of(
        stand_in,
        fake_call,
        cpu,
        block_bytes=device.block_bytes,
        graphs=(lowering.graph, graph),
        output_gradients=loss_use.gradients,
        loss_bytes=loss_use.kept_bytes,
        kernels=kernels,
    )
    report(1.0, "estimated")
    return Profiled(
        graph=graph,
        lowering=lowering,
        captured=replace(captured, call=call),
        baseline=Baseline(timeline.peak_bytes, timeline.time_s, measured=False),
        torch_device=cpu,
        record=record,
        notes=(*notes, *made.notes),
        optimizer=state,
    )


class _LossOnly(nn.Module):
    """The user's loss as a function of the model's differentiable outputs."""

    def __init__(self, loss: Loss, tree: OutputTree) -> None:
        super().__init__()
        self._loss, self._tree = loss, tree

    def forward(self, *outputs: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        value = self._loss.function(self._tree.with_tensors(outputs), *self._loss.targets)
        # AOTAutograd omits the gradient of an input that is returned, as a model's own loss is.
        return value.clone() if any(value is leaf for leaf in outputs) else value


def _loss_use(fakes: Fakes, stand_in: nn.Module, call: Call, loss: Loss, device: Device) -> LossUse:
    """Return the memory and the outputs that the loss uses, from a capture of the loss alone."""
    with fakes.mode, torch.enable_grad():
        output = stand_in(*call.args, **call.kwargs)
        tree, found = cut_output(output)
        if not found:
            return LossUse()
        # Clone, since an output may be a view of a parameter.
        cut = [t.detach().clone().requires_grad_() for t in found]
    function = loss.function
    if isinstance(function, nn.Module):
        function = fakes.model(function)
    fake_loss = Loss(function, fakes.value(loss.targets))
    module = _LossOnly(fake_loss, tree)
    captured = capture(module, Call(tuple(cut), {}), to_be_run=False)
    lowering = build(module, captured, device.block_bytes)
    graph: Graph = with_costs(lowering, estimate_costs(lowering, device))
    peak = replay(graph, store_all(graph)).peak_bytes
    held = sum(graph.tensors[i].size_bytes for i in graph.gradients)
    reached = zip(captured.primals, captured.gradients, strict=True)
    values = {p.index: g.meta["val"] for p, g in reached if g is not None and p.index is not None}
    gradients = gradients_of(tree.ranks, values)
    if loss.alone:
        leaves = tree.leaves_with(cut)
        useful = [i for i, rank in enumerate(tree.ranks) if rank in values]
        with fakes.mode, torch.enable_grad():
            dropped = unread(fake_loss.value, leaves, tree.spec, useful)
        gradients = replace(gradients, dropped=dropped)
    copied = [v for v in values.values() if not is_dense(v.shape, v.stride())]
    peak += sum(device.allocated_bytes(v.nbytes) for v in copied)
    (value,) = graph.outputs
    kept_bytes = graph.tensors[value].size_bytes
    if kept_bytes <= device.allocated_bytes(LARGEST_NUMBER_BYTES):
        kept_bytes = 0
    return LossUse(max(0, peak - graph.resident_bytes - held), gradients, kept_bytes)


def _notes(captured: Captured, device: Device) -> tuple[str, ...]:
    """Return notes for the user on an estimate."""
    notes = [f"Times and memory are estimates for {device.name} ({device.source})."]
    if device.rules != "cuda":
        return tuple(notes)
    names = Counter(
        operator_name(node.target)
        for node in captured.module.graph.nodes
        if node.op == "call_function"
    )
    if names[_FLASH_FORWARD]:
        notes.append(
            "Attention is charged as CUDA's fused kernels save it: float32 row sums, and the "
            "random generator's state."
        )
    if names["_native_batch_norm_legit_functional"]:
        notes.append("cuDNN's batch norm may keep a reserve, which is not charged.")
    if names["convolution"]:
        notes.append(
            "Of cuDNN's workspaces only the change of layout is charged; its algorithms may take "
            "more."
        )
    return tuple(notes)


TAKEN = (
    'autocast("cuda") is estimated with the casts of autocast("cpu"): softmax and norms, which '
    "CUDA computes in float32, are charged in {dtype}."
)
SWITCHED_OFF = (
    'on a machine without CUDA, torch switches autocast("cuda") off before memopt sees it, and '
    "does not say whether it was on: plan under "
    'torch.autocast("cpu", dtype={dtype}, enabled=...) for the estimate, '
    "whose casts stand for CUDA's"
)


@contextmanager
def autocast_for_cuda() -> Iterator[list[str]]:
    """Turn autocast("cuda") into autocast("cpu") of its dtype inside this context: the active one,
    and those that the model enters. Yields notes for the user, complete at the end.

    Torch switches autocast("cuda") off where there is no CUDA; elsewhere it does not touch fake
    tensors that claim to be on the CPU. The two differ in what they keep in float32: CUDA's
    computes softmax, norms and losses in it, the CPU's only some losses.

    Raises:
        ValueError: torch has switched off an autocast("cuda") that surrounds this context.
    """
    original = torch.autocast.__init__
    notes: list[str] = []
    _check_not_switched_off()

    @wraps(original)
    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
            note = TAKEN.format(dtype=_name(dtype))
            if enabled and note not in notes:
                notes.append(note)
        original(self, device_type, dtype, enabled, cache_enabled)

    with ExitStack() as stack:
        stack.enter_context(patched("torch.autocast.__init__", on_cpu))
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cuda", torch.get_autocast_dtype("cuda")))
        yield notes


def _check_not_switched_off() -> None:
    active = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if active or torch.cuda.is_available() or not _nesting():
        return
    # Torch counts the contexts entered, and keeps no list.
    dtype = torch.get_autocast_dtype("cuda")
    entered = (one for one in gc.get_objects() if type(one) is torch.autocast)
    if any((one.device, one.fast_dtype) == ("cuda", dtype) for one in entered):
        raise ValueError(SWITCHED_OFF.format(dtype=dtype))


def _nesting() -> int:
    """Return how many contexts of autocast, switched on or off, are active."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
