"""Captures models that ask whether they are compiled, with the answer that eager gets.

`torch.compiler.is_compiling()` is true while dynamo traces, and some models then compute
differently: Mamba of Hugging Face scans its states pairwise instead of one after the other, which
rounds otherwise. A model whose own code has asked is therefore traced once more with the answer
that eager gets. Code that cannot be captured that way (its branches are data-dependent) gets the
compiled answer as before. Where both ways can be captured and give two graphs, the forward decides:
it runs in eager, and the trace with its bits is taken (BART makes a mask of ones when it is not
compiled and drops it when it sees that it masks nothing, which no trace can see).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.capture.as_eager.layouts import computing_device
from memopt.errors import CaptureError
from memopt.step.dependencies import Dependencies, digest
from memopt.step.inputs import Call
from memopt.step.trial import equal_bytes
from memopt.torch_private import pytree
from memopt.torch_private.access import FILES_OF_MEMOPT, FILES_OF_TORCH
from memopt.torch_private.dynamo import asks_whether_compiled, constant, handlers_replaced
from memopt.user_code.restored_state import forward_restored

_LOG = logging.getLogger(__name__)

_FRAMES = 3
"""Innermost frames that identify a place which asks, since several ask by the same helpers."""
_MOST_PLACES = 8
"""After so many places that cannot be captured as in eager, the compiled trace is taken."""
_RAISED = "Observed exception"
"""In the message where the model's own code raises an error that the trace does not catch."""
_OF_TRACERS = (FILES_OF_TORCH, FILES_OF_MEMOPT)
"""Code of torch and memopt, which is written to be traced."""
_KNOWN_ALIKE = (
    ("transformers/masking_utils.py", ""),  # see `memopt.capture.as_eager.masks`
    ("transformers/utils/import_utils.py", "torch_compilable_check"),
    ("transformers/utils/output_capturing.py", "set"),
    ("transformers/modeling_utils.py", "warn_if_padding_and_no_attention_mask"),
    ("transformers/utils/generic.py", "_register_model_output_pytree_node"),
)
"""Ends of files, and functions in them ("": any), that compute the same whatever the answer: how a
value is kept, a check, a warning, a type's registration. Tracing again for them would double the
time of every Hugging Face model."""

Frame = tuple[str, int, str]
Place = tuple[Frame, ...]
Trace = tuple[Any, Dependencies]


@dataclass
class _Answers:
    """Answers to the model's own code, which asks whether it is compiled.

    Attributes:
        compiled: the places that get the answer yes; None: all of them do.
        asked: the places that asked, in order.
    """

    compiled: set[Place] | None
    asked: list[Place] = field(default_factory=list)

    def of(self, frames: tuple[Frame, ...]) -> bool:
        """Return whether code at these frames, the innermost first, is told that it is compiled."""
        if frames[0][0].startswith(_OF_TRACERS):
            return True
        place = frames[:_FRAMES]
        if any(_known_alike(frame) for frame in place):
            return True
        self.asked.append(place)
        return self.compiled is None or place in self.compiled

    @property
    def last_as_eager(self) -> Place | None:
        """Return the last place that was told that it is not compiled."""
        yes = self.compiled
        return next((p for p in reversed(self.asked) if yes is not None and p not in yes), None)


def traced_as_eager(model: nn.Module, call: Call, trace: Callable[[], Trace]) -> Trace:
    """Trace what a model computes when it is not compiled, if that can be traced.

    Args:
        model, call: the model to trace, and its call.
        trace: returns the traced module, which takes the call's arguments, and its dependencies.

    Returns:
        The result of `trace`.

    Raises:
        CaptureError: the model cannot be traced either way. The error is the compiled trace's,
            unless the model's own code raised that one only because it is compiled.
    """
    answers = _Answers(None)
    try:
        with _answering(answers):
            compiled = trace()
    except CaptureError as error:
        if answers.asked:
            uncompiled = _uncompiled(trace, str(error))
            if not isinstance(uncompiled, CaptureError):
                return uncompiled
            if _RAISED in str(error):
                raise uncompiled from error
        raise
    if not answers.asked:
        return compiled
    uncompiled = _uncompiled(trace)
    if isinstance(uncompiled, CaptureError):
        return compiled
    if _digest(model, uncompiled) == _digest(model, compiled):
        return compiled
    if _only_compiled_is_right(model, call, compiled[0], uncompiled[0]):
        return compiled
    return uncompiled


def _digest(model: nn.Module, trace: Trace) -> str:
    traced, dependencies = trace
    return digest(traced, model, dependencies)


def _uncompiled(trace: Callable[[], Trace], compiled_refusal: str = "") -> Trace | CaptureError:
    """Trace a model that is told that it is not compiled, except at places that cannot be traced
    so. If that fails, or is refused as the compiled trace was, return the first error."""
    compiled: set[Place] = set()
    refused: list[CaptureError] = []
    while len(compiled) <= _MOST_PLACES:
        answers = _Answers(compiled)
        try:
            with _answering(answers):
                return trace()
        except CaptureError as error:
            # Its traceback would hold this frame, which holds it.
            refused.append(error.with_traceback(None))
            place = answers.last_as_eager
            if place is None or str(error) == compiled_refusal:
                break
            _LOG.info("what %s:%d does in eager cannot be traced: %s", *place[-1][:2], error)
            compiled.add(place)
    return refused[0]


def _only_compiled_is_right(model: nn.Module, call: Call, compiled: Any, uncompiled: Any) -> bool:
    """Return whether the compiled trace alone gives eager's results, bit for bit."""
    if computing_device(model, call) is None:
        return False
    for traced in (compiled, uncompiled):
        traced.recompile()  # dynamo has renamed attributes that the code reads
    eager = _results(model, model, call)
    return _same(eager, _results(model, compiled, call)) and not _same(
        eager, _results(model, uncompiled, call)
    )


def _results(model: nn.Module, way: Callable[..., Any], call: Call) -> list[Any]:
    with forward_restored(model, call, way) as output:
        results = pytree.tree_leaves(output)
        return [one.clone() if isinstance(one, torch.Tensor) else one for one in results]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and equal_bytes(one, other)
    return bool(one == other)


@contextlib.contextmanager
def _answering(answers: _Answers) -> Iterator[None]:
    """Let `answers` answer the functions that tell code whether it is compiled."""

    def answered(handler: Callable[..., Any]) -> Callable[..., Any]:
        def answer(function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
            if answers.of(tuple(_frames(translator))):
                return handler(function, translator, *args, **kwargs)
            translator.mark_inconsistent_side_effects()
            return constant(False)

        return answer

    usual = asks_whether_compiled()
    with handlers_replaced({one: answered(handler) for one, handler in usual.items()}):
        yield


def _known_alike(frame: Frame) -> bool:
    path, _, function = frame
    return any(path.endswith(file) and name in ("", function) for file, name in _KNOWN_ALIKE)


def _frames(translator: Any) -> Iterator[Frame]:
    """Yield file, line and function of dynamo's frames, the innermost first."""
    while translator is not None:
        frame = translator.frame_summary()
        yield frame.filename, frame.lineno, frame.name
        translator = getattr(translator, "parent", None)
