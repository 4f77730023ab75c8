"""Hugging Face's Trainer: `Trainer(..., callbacks=[MemoptCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from transformers import TrainerCallback

from memopt.api.wrap import unwrap, wrap
from memopt.executor.calls import Calls
from memopt.executor.self_planning import SelfPlanning, planning_of
from memopt.strategies import Strategy

_WRAPPED: WeakSet[SelfPlanning] = WeakSet()
"""The models that callbacks have wrapped, as opposed to the user."""


class MemoptCallback(TrainerCallback):
    """Plans the model's training steps while a Trainer trains: `memopt.wrap` when training begins
    and `memopt.unwrap` when it ends.

    Args:
        budget, strategy: as for `memopt.plan`.
        options: further arguments of `memopt.wrap`.

    Attributes:
        calls: how many calls of the model ran in which way in the last training.
    """

    def __init__(
        self,
        budget: int | float | str | None = None,
        strategy: str | Strategy = "auto",
        **options: Any,
    ) -> None:
        self._options = {"budget": budget, "strategy": strategy, **options}
        self.calls = Calls()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan from the first step on.

        Raises:
            ValueError: gradient checkpointing is on, which memopt replaces.
        """
        model = kwargs["model"]
        if getattr(args, "gradient_checkpointing", False):
            raise ValueError(
                "switch gradient_checkpointing off in the TrainingArguments: memopt replaces it"
            )
        options = dict(self._options)
        optimizer = kwargs.get("optimizer")
        options.setdefault("optimizer", getattr(optimizer, "optimizer", optimizer))
        if not getattr(args, "disable_tqdm", False):
            options.setdefault("progress", False)
        if planning_of(model) in _WRAPPED:
            # An interrupted training ended without `on_train_end`.
            unwrap(model)
        wrap(model, **options)
        made = planning_of(model)
        assert made is not None
        _WRAPPED.add(made)
        self.calls = made.calls

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unwrap the model."""
        if planning_of(kwargs["model"]) is not None:
            unwrap(kwargs["model"])
