"""Applies all corrections of this package to a model's trace.

Hugging Face's decoders, called without an attention mask, ask whether their positions belong to
several packed sequences. Eager reads them, finds one sequence and lets the attention kernel be
causal. A trace cannot read them: it makes a mask of S × S for every sequence and repeats keys and
values for every head, which gives other bits, more memory, and on CUDA not the flash kernel.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.capture.as_eager.layouts import layouts_of_kernels
from memopt.capture.as_eager.masks import arguments_of
from memopt.models.locks import ForkedLock
from memopt.step.casts import casts_as_eager
from memopt.step.dropout import dropout_as_eager
from memopt.step.functions import functions_as_eager
from memopt.step.operators import Substitute
from memopt.step.updates import InPlaceAsEager, with_own_names
from memopt.torch_private.dynamo import captured_around, comptime
from memopt.torch_private.operators import aten as _ATEN
from memopt.torch_private.pytree import tree_map_only

T = TypeVar("T")


@contextmanager
def tracing_as_eager(device: torch.device | None) -> Iterator[None]:
    """Trace inside with the layouts of a device's kernels; None: nothing may be computed."""
    with torch.enable_grad(), layouts_of_kernels(device):
        yield


@contextmanager
def deriving_as_eager(traced: GraphModule) -> Iterator[None]:
    """Return a context in which AOTAutograd derives, from dynamo's graph, a joint graph with
    eager's bits. Dynamo's graph is changed.

    Enter it inside `tracing_as_eager`, and pass the resulting joint graph to `corrected`.
    """
    functions_as_eager(traced)
    with casts_as_eager(), InPlaceAsEager():
        yield


def corrected(joint: GraphModule) -> None:
    """Give a joint graph, in place, eager's operator names, results and dropout."""
    with_own_names(joint)
    correct_fake_results(joint)
    dropout_as_eager(joint)


_ONE_AT_A_TIME = ForkedLock()


class _PackedPositions(Exception):
    """The positions depend on the call's tensors, so sequences may be packed."""


def with_one_sequence(trace: Callable[[], T]) -> T:
    """Run `trace`; decoders that make their positions themselves are traced as eager runs them."""
    with _ONE_AT_A_TIME:
        try:
            with _one_sequence():
                return trace()
        except _PackedPositions:
            return trace()


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Trace inside as if no sequences were packed.

    Raises:
        _PackedPositions: (after the trace) the positions depend on the model's arguments.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    at_trace, found = comptime(), vars(masking)["find_packed_sequence_indices"]
    given: list[bool] = []

    def look(context: Any) -> None:
        given.append(bool(arguments_of(context.get_local("position_ids").as_proxy().node)))

    def none_packed(position_ids: Any) -> Any:
        if not captured_around():  # another thread's call
            return found(position_ids)
        at_trace(look)
        return None

    with mock.patch.object(masking, "find_packed_sequence_indices", none_packed):
        yield
    if any(given):
        raise _PackedPositions


# Operator → positions of the other tensors it normalises with, and of the statistics it returns.
_NORMS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    _ATEN.native_layer_norm.default: ((2, 3), (1, 2)),
    _ATEN.native_group_norm.default: ((1, 2), (1, 2)),
    _ATEN._native_batch_norm_legit_functional.default: ((1, 2, 3, 4), (1, 2)),
    _ATEN._native_batch_norm_legit.no_stats: ((1, 2), (1, 2)),
}
# Operator → (result, argument of the same dtype): new running statistics, an input's gradient.
_AS_ARGUMENT: dict[Any, tuple[tuple[int, int], ...]] = {
    _ATEN._native_batch_norm_legit_functional.default: ((3, 3), (4, 4)),
    _ATEN.native_group_norm_backward.default: ((0, 1),),
}


def _in_grad_mode(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator that does all its work only with gradients enabled. (A step runs with
    gradients disabled, since its backward is in the graph; for detached tensors autograd records
    nothing.)"""
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    with torch.enable_grad():
        return overload(*args, **kwargs)


# LSTMs on the CPU leave their backward's workspace only in grad mode.
_IN_GRAD_MODE = frozenset({_ATEN.mkldnn_rnn_layer.default})


def correct_fake_results(module: GraphModule) -> None:
    """Give the graph's operators the results and dtypes that their kernels have in eager.

    Normalisations on the CPU keep their statistics in float32 if input and parameters have
    different dtypes (autocast), else in the input's dtype, and update running statistics in their
    own dtype; the fake kernels of torch 2.11 to 2.13 say otherwise. Only the matching backward
    reads the statistics, so that nothing else depends on the wrong dtype."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _IN_GRAD_MODE:
            node.target = Substitute(node.target, _in_grad_mode)
        dtypes = _dtypes(node)
        if dtypes:
            _retype(node, dtypes)


def _dtypes(node: Node) -> dict[int, torch.dtype]:
    """Return the dtypes of results that CPU kernels give and torch may describe otherwise."""
    source = _value(node.args[0]) if node.args else None
    if source is None or source.device.type != "cpu":
        return {}
    others, statistics = _NORMS.get(node.target, ((), ()))
    beside = [_value(node.args[i]) for i in others if i < len(node.args)]
    mixed = any(other is not None and other.dtype != source.dtype for other in beside)
    dtypes = dict.fromkeys(statistics, torch.float32 if mixed else source.dtype)
    for result, argument in _AS_ARGUMENT.get(node.target, ()):
        like = _value(node.args[argument])
        if like is not None:
            dtypes[result] = like.dtype
    return dtypes


def _value(argument: Any) -> torch.Tensor | None:
    """Return the (fake) value of an argument; None if it is no tensor."""
    value = argument.meta.get("val") if isinstance(argument, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _retype(node: Node, dtypes: dict[int, torch.dtype]) -> None:
    results = list(node.meta["val"])
    for index, dtype in dtypes.items():
        if results[index] is not None and results[index].dtype != dtype:
            results[index] = results[index].to(dtype)
    node.meta["val"] = tuple(results)
    _retype_views(node)


def _retype_views(node: Node) -> None:
    """Update the (fake) values of views of a node's results."""
    for user in node.users:
        if user.target is operator.getitem or getattr(user.target, "is_view", False):
            args, kwargs = map_arg((user.args, user.kwargs), lambda one: one.meta["val"])
            user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
            _retype_views(user)
