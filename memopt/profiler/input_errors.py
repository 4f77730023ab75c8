"""Tells inputs that don't fit the model from models that cannot be captured."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memopt.capture.own_loss import NoLossError
from memopt.capture.uncaptured import check_initialised, first_line
from memopt.errors import CaptureError, InputsError
from memopt.step.inputs import Call
from memopt.step.loss import Loss
from memopt.step.ranks import alone
from memopt.step.unheard import unheard
from memopt.torch_private.aot import FAKE_LOGGER
from memopt.user_code.restored_state import state_restored

_REMEDY = (
    "`inputs` is a tensor, a tuple of positional or a dict of keyword arguments of the model's "
    "forward ((batch,) where the whole dict is one argument): check names, shapes and dtypes"
)


def check_arguments(model: nn.Module, call: Call) -> None:
    """Raise InputsError unless the call's arguments fit the model's forward, and CaptureError if
    calling the model would change it (uninitialised parameters)."""
    check_initialised(model)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        owner = f"{type(model).__name__}.forward"
        raise InputsError(
            f"the inputs do not fit the model: {error}, but it is {owner}{_short(signature)}. "
            + _REMEDY
        ) from None


def _short(signature: inspect.Signature) -> str:
    """Return the signature as text, without annotations and defaults."""
    shown = []
    for parameter in signature.parameters.values():
        star = ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = "*"
        elif parameter.kind is parameter.VAR_KEYWORD:
            star = "**"
        default = "" if parameter.default is parameter.empty else "=..."
        shown.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(shown)})"


@contextmanager
def diagnosed(model: nn.Module, call: Call, loss: Loss | None = None) -> Iterator[None]:
    """Capture and profile inside. If the model itself fails on these inputs, or its loss on these
    targets, raise an InputsError or ValueError that blames them and quotes the error."""
    logger = logging.getLogger(FAKE_LOGGER)
    level = logger.level
    # torch logs a whole traceback for an error that is raised and reported anyway.
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except (NoLossError, torch.OutOfMemoryError):
        raise  # it says what to do, or is no fault of the inputs
    except Exception as error:  # raised again unless the model fails by itself
        if not alone() or _is_refused(error):
            # A model called on this rank alone would wait for the others. And a model that memopt
            # or Dynamo refuses works by itself: calling it would only leave side effects.
            raise
        reason = _failure(model, call)
        if reason is not None:
            raise InputsError(
                "the inputs do not fit the model: without memopt it fails, too "
                f"({reason}). {_REMEDY}"
            ) from error
        reason = _failure(model, call, loss) if loss is not None else None
        if reason is None:
            raise
        assert loss is not None
        raise ValueError(
            f"the loss fails without memopt, too ({reason}): it was called as loss_fn(output, "
            f"*targets) with {len(loss.targets)} targets; pass as many in `targets=` as it takes"
        ) from error
    finally:
        logger.setLevel(level)


def _is_refused(error: Exception) -> bool:
    """Return whether a model is refused for what its code does, not for an error at run time."""
    if not isinstance(error, CaptureError):
        return False
    cause = error.__cause__
    # Dynamo refuses exceptions that the code itself raises in the same way.
    said = first_line(cause) if isinstance(cause, Exception) else ""
    raised = "exception" in said or "Error" in said
    return cause is None or (type(cause).__name__ == "Unsupported" and not raised)


def _failure(model: nn.Module, call: Call, loss: Loss | None = None) -> str | None:
    """Call the model, or also its loss, and return its error; None if it works."""
    reason = None
    # A forward that differentiates needs gradients; without them a call takes less memory.
    for gradients in (torch.no_grad, torch.enable_grad):
        try:
            parts = loss.parts if loss is not None else ()
            with (
                state_restored(model, call, *parts) as kept,
                gradients(),
                kept.first_run(),
                unheard(),
            ):
                output = model(*call.args, **call.kwargs)
                if loss is not None:
                    loss.function(output, *loss.targets)
            return None
        except CaptureError:
            return None  # other ranks would have to run it, too
        except Exception as error:  # noqa: BLE001  # a user's model may raise anything
            reason = reason or f"{type(error).__name__}: {first_line(error)}"
    return reason
