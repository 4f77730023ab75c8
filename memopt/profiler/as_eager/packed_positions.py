"""What Hugging Face's models do otherwise while they are traced, done as eager does it.

Without an attention mask a decoder asks whether its positions are those of several packed
sequences. Eager reads them, finds one sequence and lets the attention kernel be causal; a trace
cannot read them, so it makes a mask of S × S for every sequence and repeats keys and values for
every head: other bits, more memory, and on CUDA not the flash kernel.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

from torch.fx import Node

from memopt.models.locks import ForkedLock

T = TypeVar("T")

_ONE_AT_A_TIME = ForkedLock()


class _PackedPositions(Exception):
    """The positions depend on the call's tensors: they may be those of packed sequences."""


def with_one_sequence(trace: Callable[[], T]) -> T:
    """What `trace` traces; decoders that count their positions themselves as eager runs them."""
    with _ONE_AT_A_TIME:
        try:
            with _one_sequence():
                return trace()
        except _PackedPositions:
            return trace()


@contextlib.contextmanager
def _one_sequence() -> Iterator[None]:
    """No sequences are packed.

    Raises:
        _PackedPositions: (after the trace) that depends on what the model is called with.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    from torch._dynamo.comptime import comptime

    given: list[bool] = []

    def look(context: Any) -> None:
        given.append(_depends_on_call(context.get_local("position_ids").as_proxy().node))

    def none_packed(position_ids: Any) -> None:
        comptime(look)

    with mock.patch.object(masking, "find_packed_sequence_indices", none_packed):
        yield
    if any(given):
        raise _PackedPositions


def _depends_on_call(node: Node) -> bool:
    """Whether a traced value is computed from an argument of the model."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder":
            return True
        for source in one.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False
