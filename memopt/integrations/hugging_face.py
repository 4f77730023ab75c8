"""Hugging Face's Trainer: `Trainer(..., callbacks=[MemoptCallback("20GiB")])`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from transformers import TrainerCallback

from memopt.api.wrap import unwrap, wrap
from memopt.executor.calls import Calls
from memopt.executor.ready_plans import ReadyPlans
from memopt.executor.self_planning import SelfPlanning, planning_of
from memopt.step.optimizer_state import optimizer_state
from memopt.strategies import Strategy
from memopt.torch_private.modules import forward_hooks_of

_LOG = logging.getLogger(__name__)

_WRAPPED: WeakSet[SelfPlanning] = WeakSet()
"""The models that callbacks have wrapped, as opposed to the user."""


class MemoptCallback(TrainerCallback):
    """Plans the model's training steps while a Trainer trains: `memopt.wrap` when training begins
    and `memopt.unwrap` when it ends. The trainer's log gets a line for each plan, as "memopt".

    Args:
        budget, strategy: as for `memopt.plan`.
        options: further arguments of `memopt.wrap`.

    Attributes:
        calls: how many calls of the model ran in which way in the last training.
        plans: the plans of the last training.
    """

    def __init__(
        self,
        budget: int | float | str | None = None,
        strategy: str | Strategy = "auto",
        **options: Any,
    ) -> None:
        self._options = {"budget": budget, "strategy": strategy, **options}
        self.calls, self.plans = Calls(), ReadyPlans()
        self._logged = 0
        self._checkpointing_on: Callable[[], None] = _nothing

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan from the first step on. Gradient checkpointing is off until training ends."""
        model = kwargs["model"]
        self._checkpointing_on = _checkpointing_off(model)
        if getattr(args, "torch_compile", False):
            _LOG.warning(
                "torch_compile compiles nothing while memopt plans the steps; "
                'MemoptCallback(..., kernels="compiled") plans compiled kernels'
            )
        options = dict(self._options)
        optimizer = kwargs.get("optimizer")
        options.setdefault("optimizer", _known(getattr(optimizer, "optimizer", optimizer), model))
        if not getattr(args, "disable_tqdm", False):
            options.setdefault("progress", False)
        if planning_of(model) in _WRAPPED:
            # An interrupted training ended without `on_train_end`.
            unwrap(model)
        wrap(model, **options)
        made = planning_of(model)
        assert made is not None
        _WRAPPED.add(made)
        self.calls, self.plans, self._logged = made.calls, made.plans, 0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the plans that were made since the last log of a training step."""
        logs, lines = kwargs.get("logs"), self.plans.lines[self._logged :]
        if not lines or not isinstance(logs, dict) or "loss" not in logs:
            return
        self._logged += len(lines)
        for one in (logs, *state.log_history[-1:]):
            one["memopt"] = "; ".join(lines)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unwrap the model, and leave gradient checkpointing as it was."""
        if planning_of(kwargs["model"]) is not None:
            unwrap(kwargs["model"])
        self._checkpointing_on()
        self._checkpointing_on = _nothing


def _nothing() -> None:
    pass


def _known(optimizer: Any, model: Any) -> Any:
    """Return the optimizer, unless what state it will keep is only seen when it has stepped: then
    None, with a notice."""
    try:
        optimizer_state(optimizer, model.parameters())
    except ValueError as error:
        _LOG.warning(
            "the optimizer's state is charged from the second step on, as it is met: %s", error
        )
        return None
    return optimizer


def _checkpointing_off(model: Any) -> Callable[[], None]:
    """Switch gradient checkpointing off in a model, with a notice; return what switches it on."""
    layers = [
        one for one in model.modules() if getattr(one, "gradient_checkpointing", None) is True
    ]
    if not layers:
        return _nothing
    _LOG.warning(
        "gradient_checkpointing is switched off while memopt plans the steps: it decides itself "
        "what is recomputed"
    )
    for one in layers:
        one.gradient_checkpointing = False
    # Checkpointing lets the embeddings' output require gradients, by hooks that are not needed now.
    hooks = [
        (registered, key, hook)
        for registered in map(forward_hooks_of, model.modules())
        for key, hook in registered.items()
        if "make_inputs_require_grads" in getattr(hook, "__qualname__", "")
    ]
    for registered, key, _ in hooks:
        del registered[key]

    def switch_on() -> None:
        for one in layers:
            one.gradient_checkpointing = True
        for registered, key, hook in hooks:
            registered[key] = hook

    return switch_on
