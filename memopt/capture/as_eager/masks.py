"""Traces attention masks that mask nothing as eager treats them.

Hugging Face's models check whether an attention mask masks anything and, if not, drop it; a trace
cannot check and keeps it. Most models compute the same numbers either way. Two kinds do not, in low
precision. Of models that add a learned position bias to the scores (T5 and its kin), with a mask
each sequence has its own bias, whose gradients are rounded before they are summed over the batch;
without one, all share one bias, summed first. Models whose queries share keys and values (Llama and
its kin) repeat these for every query under a mask, and round each gradient before they are summed;
without one, the kernel sums them. So such calls are captured without the mask, and a model that
plans its own calls (`memopt.wrap`) checks each call's masks, as eager does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.fx import Node

from memopt.models.warned import warn
from memopt.step.inputs import Call
from memopt.step.ranks import ranks_of
from memopt.torch_private.dynamo import comptime

T = TypeVar("T")


def rounds_by_mask(model: nn.Module) -> bool:
    """Return whether some Hugging Face attention in a model computes other bits with a mask that
    masks nothing: it adds a learned position bias, or its queries share keys and values."""
    return "transformers.masking_utils" in sys.modules and any(
        name.endswith("relative_attention_bias") or getattr(module, "num_key_value_groups", 1) != 1
        for name, module in model.named_modules()
    )


def none_masks(model: nn.Module, call: Call) -> bool:
    """Return whether `masks_nothing` holds of a call on all ranks, which must capture alike."""
    own, ranks = masks_nothing(model, call), ranks_of(model)
    if ranks is None:
        return own
    everyone = all(ranks.exchanged(own, "masks are looked at"))
    if own and not everyone:
        warn(
            "this rank's attention masks mask nothing, and another rank's do: all run with masks, "
            "and last bits can differ from the unplanned model's. Pad on all ranks, or on none",
        )
    return everyone


def masks_nothing(model: nn.Module, call: Call) -> bool:
    """Return whether a call has attention masks, and all of them hold only ones."""
    masks = _masks(model, call)
    return bool(masks) and all(bool(mask.all()) for mask in masks)


def _masks(model: nn.Module, call: Call) -> list[torch.Tensor]:
    by_place = zip(
        inspect.signature(type(model).forward).parameters, (model, *call.args), strict=False
    )
    return [
        value
        for name, value in (*by_place, *call.kwargs.items())
        if name.endswith("attention_mask") and isinstance(value, torch.Tensor) and value.dim() == 2
    ]


class _OtherMasks(Exception):
    """The model also makes masks of other arguments, which may mask something."""


def with_whole_masks(model: nn.Module, call: Call, trace: Callable[[], T]) -> T:
    """Run `trace`; if the call's masks mask nothing, the model is traced without them."""
    if not call.whole_masks:
        return trace()
    try:
        with _whole_masks(model, call):
            return trace()
    except _OtherMasks:
        return trace()


@contextmanager
def _whole_masks(model: nn.Module, call: Call) -> Iterator[None]:
    """Trace inside as if masks made of the call's attention masks masked nothing.

    Raises:
        _OtherMasks: (after the trace) some masks are made of other arguments.
    """
    masking: Any = sys.modules["transformers.masking_utils"]
    at_trace = comptime()
    read: set[str] = set()

    def look(context: Any) -> None:
        read.update(arguments_of(context.get_local("padding_mask").as_proxy().node))

    def without_mask(original: Callable[..., bool]) -> Callable[..., bool]:
        def skips(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
            if padding_mask is not None:
                at_trace(look)
            return original(None, *args, **kwargs)

        return skips

    causal, both_ways = masking._ignore_causal_mask_sdpa, masking._ignore_bidirectional_mask_sdpa
    with (
        mock.patch.object(masking, "_ignore_causal_mask_sdpa", without_mask(causal)),
        mock.patch.object(masking, "_ignore_bidirectional_mask_sdpa", without_mask(both_ways)),
    ):
        yield
    masks = set(map(id, _masks(model, call)))
    # Dynamo's names of the flat arguments.
    whole = {f"l_flat_args_{i}_" for i, leaf in enumerate(call.leaves) if id(leaf) in masks}
    if not read <= whole:
        raise _OtherMasks


def arguments_of(node: Node) -> set[str]:
    """Return the names of the arguments and tensors of the model that a value in dynamo's trace is
    computed from."""
    seen, stack, found = {node}, [node], set()
    while stack:
        one = stack.pop()
        if one.op == "placeholder":
            found.add(one.name)
        for source in one.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return found
