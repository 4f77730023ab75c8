"""Takes CTC losses into graphs as they are: how much they keep follows from the labels' lengths,
which are values of tensors, as is what Hugging Face's speech models select of their labels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from memopt.capture.opaque_calls import declare_opaque
from memopt.torch_private.functions_applied import functions_applied
from memopt.user_code.opaque import Function
from memopt.user_code.opaque_function import as_autograd_function


def ctc_losses_whole() -> contextlib.AbstractContextManager[None]:
    """Return a context in which traces take CTC losses as one operator each, of Hugging Face's
    together with the selection of labels."""
    labelled = getattr(sys.modules.get("transformers.loss.loss_ctc"), "ForCTCLoss", None)
    functions = (functional.ctc_loss, labelled)
    return functions_applied({one: _opaque(one) for one in functions if one is not None})


@functools.cache
def _opaque(function: Callable[..., Tensor]) -> Function:
    signature = inspect.signature(function)

    def costliest(names: Sequence[str], *values: Any) -> None:
        count = len(values) - len(names)
        named = dict(zip(names, values[count:], strict=True))
        bound = signature.bind(*values[:count], **named)
        bound.apply_defaults()
        _make_longest(bound.arguments)

    made = as_autograd_function(function)
    made.costliest = costliest  # type: ignore[attr-defined]
    declare_opaque(made)
    return made


def _make_longest(given: dict[str, Any]) -> None:
    """Change a loss's arguments to those for which it needs the most memory: all labels count, in
    sequences as long as they can be."""
    if "labels" in given:
        unread = given["blank_token_id"], given["ignore_index"]
        given["labels"].fill_(next(one for one in range(3) if one not in unread))
        given["logit_lengths"].fill_(given["logits"].shape[-2])
        return
    targets, lengths = given["targets"], given["target_lengths"]
    targets.fill_(int(given["blank"] == 0))
    for one in (given["input_lengths"], lengths):
        one.fill_(given["log_probs"].shape[0]) if isinstance(one, Tensor) else None
    if isinstance(lengths, Tensor) and targets.dim() > 1:
        lengths.fill_(targets.shape[-1])
    elif isinstance(lengths, Tensor):  # one after the other: one sequence has them all
        lengths.zero_().flatten()[:1].fill_(targets.numel())
