"""Lightning: `Trainer(callbacks=[MemoptCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.utilities import rank_zero_info
except ImportError:
    from pytorch_lightning import Callback, LightningModule
    from pytorch_lightning.utilities import rank_zero_info
from torch import nn

from memopt.api.wrap import unwrap, wrap
from memopt.executor.calls import Calls
from memopt.executor.ready_plans import ReadyPlans
from memopt.executor.self_planning import planning_of
from memopt.step.optimizer_state import PER_PARAMETER
from memopt.strategies import Strategy


def _optimizer_of(module: nn.Module, optimizers: list[Any]) -> Any:
    """Return the only optimizer that trains a module, if its state is known before its first step;
    else None, and the state is charged once it exists."""
    own = {id(parameter) for parameter in module.parameters()}
    found = [
        one
        for one in optimizers
        if any(id(p) in own for group in one.param_groups for p in group["params"])
    ]
    return found[0] if len(found) == 1 and type(found[0]) in PER_PARAMETER else None


class MemoptCallback(Callback):
    """Plans a model's training steps while Lightning fits it: `memopt.wrap` when fitting begins
    and `memopt.unwrap` when it ends. The optimizer's state is charged. Lightning's logger of
    messages gets a line for each plan.

    Args:
        budget, strategy: as for `memopt.plan`.
        module: the name of the sub-module that `training_step` calls ("model"); None: the
            LightningModule itself where it has a forward, and its only sub-module with
            parameters.
        options: further arguments of `memopt.wrap`.

    Attributes:
        calls: how many calls ran in which way in the last fit.
        plans: the plans of each planned module in the last fit.
    """

    def __init__(
        self,
        budget: int | float | str | None = None,
        strategy: str | Strategy = "auto",
        *,
        module: str | None = None,
        **options: Any,
    ) -> None:
        self._module = module
        self._options = {"budget": budget, "strategy": strategy, "progress": False, **options}
        self._wrapped: list[nn.Module] = []
        self.calls, self.plans = Calls(), list[ReadyPlans]()
        self._said = 0

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan from the first training step on.

        Raises:
            ValueError: several modules may be the one that `training_step` calls.
        """
        self.calls, self.plans, self._said = Calls(), [], 0
        for module in self._planned(pl_module):
            options = {"optimizer": _optimizer_of(module, trainer.optimizers), **self._options}
            wrap(module, **options)
            self._wrapped.append(module)
            made = planning_of(module)
            assert made is not None
            made.count_in(self.calls)
            self.plans.append(made.plans)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Say which plans were made in this step."""
        lines = [line for plans in self.plans for line in plans.lines]
        if len(lines) > self._said:
            for line in lines[self._said :]:
                rank_zero_info(line)
            self._said = len(lines)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Unwrap the modules."""
        self._undo()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: Any) -> None:
        """Unwrap the modules: Lightning calls `teardown` only if training succeeds."""
        self._undo()

    def _undo(self) -> None:
        while self._wrapped:
            unwrap(self._wrapped.pop())

    def _planned(self, pl_module: LightningModule) -> list[nn.Module]:
        if self._module is not None:
            return [pl_module.get_submodule(self._module)]
        if self._options.get("parts") not in (None, "auto"):
            return [pl_module]
        inner = {
            name: module
            for name, module in pl_module.named_children()
            if any(p.requires_grad for p in module.parameters())
        }
        if len(inner) > 1 and type(pl_module).forward is LightningModule.forward:
            raise ValueError(
                f"which of {', '.join(inner)} does training_step call? Name one: "
                'MemoptCallback(..., module="..."), or several that share the budget: '
                f"MemoptCallback(..., parts={list(inner)})"
            )
        own = [] if type(pl_module).forward is LightningModule.forward else [pl_module]
        return own + (list(inner.values()) if len(inner) == 1 else [])
