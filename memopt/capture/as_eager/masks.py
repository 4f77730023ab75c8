"""Traces attention masks that mask nothing as eager treats them.

Hugging Face's models check whether an attention mask masks anything and, if not, drop it; a trace
cannot check and keeps it. Most models compute the same numbers either way. Two kinds do not. Models
whose queries share keys and values (Llama and its kin) repeat these for every query under a mask,
and gradients are summed behind the kernel; without one, the kernel sums them. In low precision, of
models that add a learned position bias to the scores (T5 and its kin), with a mask each sequence
has its own bias, whose gradients are rounded before they are summed over the batch; without one,
all share one bias, summed first. So such calls are captured without the mask, and a model that
plans its own calls (`memopt.wrap`) checks each call's masks, as eager does.
"""

from __future__ import annotations

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
from memopt.torch_private.aot import FakeTensor
from memopt.torch_private.dynamo import captured_around, comptime

T = TypeVar("T")


def rounds_by_mask(model: nn.Module) -> bool:
    """Return whether some Hugging Face attention in a model computes other bits with a mask that
    masks nothing: it adds a learned position bias, or its queries share keys and values."""
    return "transformers.masking_utils" in sys.modules and any(
        name.endswith("relative_attention_bias") or getattr(module, "num_key_value_groups", 1) != 1
        for name, module in model.named_modules()
    )


def none_masks(model: nn.Module, call: Call) -> tuple[int, ...]:
    """Return `masks_nothing` of a call, the same on all ranks, which must capture the same
    graph."""
    own, ranks = masks_nothing(call), ranks_of(model)
    if ranks is None:
        return own
    everyone = set(own).intersection(*ranks.exchanged(own, "masks are looked at"))
    if everyone != set(own):
        warn(
            "this rank's attention masks mask nothing, and another rank's do: all run with masks, "
            "and last bits can differ from the unplanned model's. Pad on all ranks, or on none",
        )
    return tuple(sorted(everyone))


def masks_nothing(call: Call) -> tuple[int, ...]:
    """Return which of a call's flat arguments are matrices of ones, like masks that mask
    nothing."""
    return tuple(number for number, leaf in _matrices(call) if bool((leaf == 1).all()))


def _matrices(call: Call) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a call's flat arguments that are matrices with values, by number."""
    for number, leaf in enumerate(call.leaves):
        if (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, FakeTensor)
            and (leaf.dim(), leaf.layout, leaf.is_meta) == (2, torch.strided, False)
        ):
            yield number, leaf


_CASTS = {"to", "type", "bool", "long", "int", "float", "contiguous", "clone", "detach"}
_MOVES = {"cat", "chunk", "expand", "flatten", "getitem", "narrow", "repeat", "repeat_interleave"}
_PASSES = {*_CASTS, *_MOVES, "reshape", "split", "squeeze", "stack", "unsqueeze", "view"}
_ONES = {"ones", "new_ones", "ones_like"}
"""Names of operators that keep or move a mask's values, and of those that make ones."""


def with_whole_masks(model: nn.Module, call: Call, trace: Callable[[], T]) -> T:
    """Run `trace` without the masks that mask nothing, as eager leaves them out, if all are known
    to: they are arguments of ones, or ones that the model makes. Warn of masks that are kept and
    may mask nothing."""
    if not rounds_by_mask(model):
        return trace()
    leaves_out = (bool(call.whole_masks),) * 2
    with _masks_seen(leaves_out) as masks:
        traced = trace()
    sources = [list(map(_sources, kind)) for kind in masks]
    known = tuple(
        _are_of(kind, call.whole_masks) if kind else out
        for kind, out in zip(sources, leaves_out, strict=True)
    )
    _warn_of_kept(model, call, sources)
    if known == leaves_out:
        return traced
    with _masks_seen(known):
        return trace()


def _are_of(sources: list[set[str] | None], leaves: tuple[int, ...]) -> bool:
    """Return whether masks are copies of these flat arguments, or made of ones."""
    names = {f"l_flat_args_{number}_" for number in leaves}  # Dynamo's
    return all(reads is not None and reads <= names for reads in sources)


def _warn_of_kept(model: nn.Module, call: Call, sources: list[list[set[str] | None]]) -> None:
    """Warn of masks that a trace keeps, and eager may not; `sources`: of the causal masks, and of
    the others."""
    kept = [
        kind
        for is_causal, kind in zip((True, False), sources, strict=True)
        if not _are_of(kind, call.whole_masks) and _rounds(model, is_causal)
    ]
    if any(None in kind for kind in kept):
        warn(
            "the model computes an attention mask. The planned step keeps it where the unplanned "
            "model leaves it out, since it masks nothing: last bits may differ then. Pass the mask "
            "as an argument"
        )
    elif any(_are_of(kind, masks_nothing(call)) for kind in kept):
        warn(
            "an attention mask of the example masks nothing. The unplanned model leaves such a "
            "mask out, and the planned step keeps it: last bits of gradients may differ. Plan "
            "without the mask if nothing is padded; memopt.wrap(model) looks at each batch's"
        )


def _rounds(model: nn.Module, causal: bool) -> bool:
    """Return whether a model computes other bits with a mask of this kind that masks nothing: its
    queries share keys and values there, or it computes in less than single precision."""
    if any(
        getattr(module, "num_key_value_groups", 1) != 1
        and getattr(module, "is_causal", causal) == causal
        for module in model.modules()
    ):
        return True
    parameters = list(model.parameters())
    low = any(one.is_floating_point() and one.itemsize < 4 for one in parameters)
    return low or any(torch.is_autocast_enabled(one.device.type) for one in parameters[:1])


class KeptMasks:
    """Warns once, when a call's mask masks nothing and its plan, made for padded inputs, keeps it.

    Args:
        model: the planned model.
        call: the call that it is planned for.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        rounds = rounds_by_mask(model) and (_rounds(model, True) or _rounds(model, False))
        self._leaves = {
            number
            for number, leaf in (_matrices(call) if rounds else ())
            if bool(((leaf == 0) | (leaf == 1)).all()) and not bool((leaf == 1).all())
        }

    def look(self, call: Call) -> None:
        """Look at the masks of a call that runs planned."""
        watched = (leaf for n, leaf in _matrices(call) if n in self._leaves) if self._leaves else ()
        if any(bool((leaf == 1).all()) for leaf in watched):
            self._leaves = set()
            warn(
                "an attention mask of this call masks nothing, and the plan is of padded inputs. "
                "The unplanned model leaves such a mask out, and the planned step keeps it: last "
                "bits of gradients may differ. memopt.wrap(model) has a plan for each"
            )


@contextmanager
def _masks_seen(leaves_out: tuple[bool, ...]) -> Iterator[tuple[list[Node], list[Node]]]:
    """Trace inside, with masks left out as if they masked nothing, or with them: the causal ones,
    and the others.

    Yields:
        The nodes of Dynamo's trace from which masks of each kind are made; filled while tracing.
    """
    masking: Any = sys.modules["transformers.masking_utils"]
    at_trace = comptime()
    masks: tuple[list[Node], list[Node]] = ([], [])

    def seen(name: str, leaves_out: bool, masks: list[Node]) -> Any:
        original: Callable[..., bool] = getattr(masking, name)

        def look(context: Any) -> None:
            masks.append(context.get_local("padding_mask").as_proxy().node)

        def skips(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
            if not captured_around():  # another thread's call
                return original(padding_mask, *args, **kwargs)
            if padding_mask is not None:
                at_trace(look)
            return original(None if leaves_out else padding_mask, *args, **kwargs)

        return mock.patch.object(masking, name, skips)

    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
    causal, both_ways = map(seen, names, leaves_out, masks)
    with causal, both_ways:
        yield masks


def _sources(mask: Node) -> set[str] | None:
    """Return the names of the arguments that a mask is a copy of; empty for a mask of ones; None if
    the model computes it in another way."""
    stack, found = [mask], set()
    while stack:
        one = stack.pop()
        name = one.target if isinstance(one.target, str) else one.target.__name__
        if one.op == "placeholder":
            found.add(one.name)
        elif name in _PASSES:
            stack += one.all_input_nodes
        elif name not in _ONES:
            return None
    return found


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
