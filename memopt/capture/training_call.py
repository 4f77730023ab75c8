"""Adds the arguments that a Hugging Face model needs to train to the user's own.

A model that is configured to generate returns its keys and values unasked. A training step does not
need them, and they would keep every layer's alive; gradient checkpointing switches that off, too.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memopt.capture.remedies import check_outside_fabric
from memopt.capture.taken import check_leaves
from memopt.step.inputs import Call, to_call

_LOG = logging.getLogger(__name__)


def training_call(model: nn.Module, inputs: Any) -> Call:
    """Turn a user's `inputs` into the call to plan: `to_call`, and what a training loop would add.

    Raises:
        CaptureError: Lightning Fabric's `setup` made the model, or an argument cannot be taken.
    """
    check_outside_fabric(model)
    call = to_call(inputs)
    check_leaves(call)
    settle_problem_type(model, call)
    kwargs = without_keys(model, call.args, call.kwargs)
    return call if kwargs is call.kwargs else replace(call, kwargs=kwargs)


def without_keys(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keyword arguments with `use_cache=False` where a training step of the model
    would return keys and values unasked."""
    if not model.training or not _keeps_keys(model):
        return kwargs
    # An adapted model (PEFT) passes on its arguments.
    inner: Any = getattr(model, "get_base_model", None)
    base = inner() if callable(inner) else model
    if "use_cache" in kwargs or not _takes_it(base, len(args)):
        return kwargs
    return {**kwargs, "use_cache": False}


def _takes_it(model: nn.Module, given: int = 0) -> bool:
    """Return whether a forward takes `use_cache`, after so many arguments, or hands it on as one of
    its **kwargs to a model inside that keeps keys and values."""
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in list(parameters)[given:]:
        return True
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return False
    inside = (one for one in model.children() if hasattr(one, "config"))
    return any(_keeps_keys(one) and _takes_it(one) for one in inside)


def as_planned(planned: Call, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keyword arguments with those that `training_call` added to the planned
    call."""
    if "use_cache" in planned.kwargs and "use_cache" not in kwargs:
        return {**kwargs, "use_cache": planned.kwargs["use_cache"]}
    return kwargs


def call_notes(model: nn.Module, call: Call) -> tuple[str, ...]:
    """Return notes for the user on the call that is planned."""
    notes = []
    if not model.training and any(type(m).__name__.startswith("Dropout") for m in model.modules()):
        notes.append("Planned in eval mode, without dropout; to train, call model.train() first.")
    if call.kwargs.get("use_cache") is False and _keeps_keys(model):
        notes.append(
            "Planned with use_cache=False: a training step returns no keys and values. A step that "
            "fills a cache may differ from it in last bits."
        )
    return tuple(notes)


def _keeps_keys(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is configured to return its keys and values. A
    decoder may have its own configuration (T5's), which trainers leave alone."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "use_cache", False) is True for config in configs)


def settle_problem_type(model: nn.Module, call: Call) -> None:
    """Set `config.problem_type` of a classifier that has labels and no problem type to what its own
    first call would set. A planned step cannot: it changes only tensors."""
    config, labels = getattr(model, "config", None), call.kwargs.get("labels")
    if not isinstance(labels, torch.Tensor) or getattr(config, "problem_type", "") is not None:
        return
    classes = getattr(model, "num_labels", getattr(config, "num_labels", 0))
    if classes == 1:
        chosen = "regression"
    elif labels.dtype in (torch.long, torch.int):
        chosen = "single_label_classification"
    else:
        chosen = "multi_label_classification"
    _LOG.info("config.problem_type is %s from now on, as the model's first call sets it", chosen)
    config.problem_type = chosen  # type: ignore[union-attr]  # it has the attribute
