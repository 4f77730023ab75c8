"""Why a model's forward is not one graph, in words that say what to do."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from memopt.errors import CaptureError


def check_initialised(model: nn.Module) -> None:
    """Refuse lazy modules, whose first forward makes their parameters.

    Raises:
        CaptureError: there is one, named.
    """
    for name, module in model.named_modules():
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in held):
            raise CaptureError(
                f"{type(module).__name__} {name!r} has no parameters before the model has been "
                "called once, and planning leaves a model as it is: call the model, then plan"
            )


def why_not_captured(model: nn.Module, error: Exception) -> str:
    """What dynamo refused in a model's forward, where, and what to do about it."""
    known = _cumulative_average(model)
    if known is not None:
        return known
    stack = getattr(error, "real_stack", None)
    home = os.path.dirname(torch.__file__)
    frames = [f for f in stack or () if f.filename and not f.filename.startswith(home)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"the model cannot be captured as one graph{where}: {first}. memopt needs a forward "
        "without data-dependent Python control flow (.item(), tensor truth values); rewrite that "
        "part with tensor operators (torch.where) or plan the sub-modules around it"
    )


def _cumulative_average(model: nn.Module) -> str | None:
    """Batch norm that averages over all steps, which divides by a step counter read in Python."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.momentum is None and module.training:
            return (
                f"{type(module).__name__} {name!r} has momentum=None: its average over all steps "
                "divides by the number of steps, read in Python in every forward, which one graph "
                "cannot hold. Give it a momentum (torch's default is 0.1), or "
                "track_running_stats=False"
            )
    return None
