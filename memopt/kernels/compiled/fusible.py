"""Tells which operators Inductor fuses into one kernel; the others are anchors and stay ATen's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from memopt.kernels.compiled.dropout import is_dropout
from memopt.step.memory_layout import spans_storage
from memopt.step.nodes import is_random, tensors_of
from memopt.torch_private.operators import OpOverload


def _overloads(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_REDUCTIONS = _overloads(
    """
    sum.default sum.dim_IntList mean.default mean.dim amax.default amin.default var.correction
    var_mean.correction logsumexp.default linalg_vector_norm.default
    """
)
_NORMS = _overloads(
    """
    native_layer_norm.default native_layer_norm_backward.default native_group_norm.default
    native_group_norm_backward.default _native_batch_norm_legit_functional.default
    native_batch_norm_backward.default _fused_rms_norm.default _fused_rms_norm_backward.default
    _softmax.default _softmax_backward_data.default _safe_softmax.default _log_softmax.default
    _log_softmax_backward_data.default nll_loss_forward.default nll_loss_backward.default
    mse_loss.default mse_loss_backward.default
    """
)
_COPIES = _overloads(
    """
    cat.default stack.default slice_backward.default
    select_backward.default constant_pad_nd.default repeat.default tril.default triu.default
    flip.default roll.default embedding.default gather.default
    """
)
_UNTAGGED = _overloads(
    """
    where.self where.ScalarSelf where.ScalarOther where.Scalar fill.Scalar fill.Tensor
    hardtanh_backward.default hardswish.default hardswish_backward.default elu_backward.default
    softplus_backward.default native_dropout_backward.default
    """
)
"""Pointwise operators that torch does not tag as such."""
_SAME_ELEMENTS = _overloads("_to_copy.default clone.default copy.default")
_FUSED = _REDUCTIONS | _NORMS | _COPIES | _SAME_ELEMENTS | _UNTAGGED
_MADE_OF_NOTHING = _overloads(
    """
    full.default full_like.default zeros.default zeros_like.default ones.default ones_like.default
    scalar_tensor.default arange.default arange.start arange.start_step new_zeros.default
    new_ones.default new_full.default
    """
)


def is_fusible(node: Node) -> bool:
    """Return whether a kernel call can be part of a region."""
    target: Any = node.target
    if is_dropout(node):
        return True
    if not isinstance(target, OpOverload) or is_random(node):
        return False
    values = tensors_of(node, *node.all_input_nodes)
    if not all(map(_plain, values)) or len({value.device.type for value in values}) > 1:
        return False
    # Results of copies into views (`aten.copy`, `slice_scatter`...) can lie in a larger storage, of
    # which `as_strided` may read more; compiled kernels write the results alone.
    if not all(map(spans_storage, tensors_of(node))):
        return False
    name = str(target)
    return _is_tagged(target) or name in _FUSED or name in _MADE_OF_NOTHING


def is_pointwise(node: Node) -> bool:
    """Return whether an element of a fusible call's result depends on few operand elements."""
    target: Any = node.target
    name = str(target)
    cheap = name in _UNTAGGED or name in _SAME_ELEMENTS or name in _MADE_OF_NOTHING
    return is_dropout(node) or cheap or _is_tagged(target)


def _is_tagged(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags and target.namespace in ("aten", "prims")


def is_constant(node: Node) -> bool:
    """Return whether a call makes the same small values from numbers alone; every region that reads
    them makes them itself."""
    return str(node.target) in _MADE_OF_NOTHING


def _plain(value: torch.Tensor) -> bool:
    """Return whether a strided tensor is real, not empty and not lazily negated."""
    return (
        value.layout is torch.strided
        and not value.is_complex()
        and value.numel() > 0
        and not value.is_neg()
    )
