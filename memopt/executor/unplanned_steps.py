"""Runs a whole training step without its plan, where its forward goes another way than planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memopt.models.warned import warn
from memopt.step.assumed import Assumption, Odds
from memopt.step.input_values import InputValueError
from memopt.step.inputs import Call
from memopt.step.step_parts import StepParts

_OFTEN = "branches of the forward went another way than planned in most steps before"


class UnplannedSteps:
    """Runs the steps of a train step that differ from its plan in values.

    Args:
        parts: the captured step.
        assumed: how its branches are assumed to go.
        optimizer: the step's.
        stays: whether parameters and optimizer state stay on the device.

    Attributes:
        branches: those of `assumed` that go on another way, instead of an error.
        count: how many steps ran.
        expected: why the next step runs without its plan, as far as its inputs tell.

    Raises:
        ValueError: there are such branches, and tensors are elsewhere between steps.
    """

    def __init__(
        self,
        parts: StepParts,
        assumed: Sequence[Assumption],
        optimizer: torch.optim.Optimizer,
        stays: bool,
    ) -> None:
        self.branches = tuple(one for one in assumed if not one.raises)
        if self.branches and not stays:
            raise ValueError(
                f"the step has a data-dependent branch ({self.branches[0].shown}), and a step "
                "whose parameters or optimizer state are on the host between steps cannot run "
                "without its plan when the branch goes another way than planned: plan without "
                "offload_optimizer and moved parameters, or the module alone (memopt.plan(model, "
                "inputs) and plan.apply, or memopt.wrap)"
            )
        self.count = 0
        self._parts, self._optimizer, self._stays = parts, optimizer, stays
        self._odds, self.expected = Odds(), ""

    def expect(self, error: InputValueError, alone: bool) -> None:
        """Run the next step, whose inputs have other values than planned.

        Raises:
            InputValueError: the step cannot run without its plan.
        """
        rules = self._parts.rules
        if rules.micro_batches > 1 or rules.scaled or not (alone and self._stays):
            raise error
        self.expected = str(error)

    def before(self) -> str:
        """Return why the next step runs without its plan from the beginning; "": it does not."""
        return self.expected or (_OFTEN if self.branches and self._odds.leave_out() else "")

    def note(self, otherwise: bool) -> None:
        """Note whether a step that began under the plan went another way."""
        if self.branches:
            self._odds.note(otherwise)

    def run(self, call: Call, why: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step as the loop would without memopt. If it fails, no gradients are left.

        Args:
            call: of the step's module.
            why: why it runs without its plan.

        Returns:
            The loss, and the norm of the gradients if they are clipped.
        """
        self.count += 1
        if self.count == 1:
            warn(
                f"a training step ran without its plan, outside of its budget: {why}. The train "
                "step's .unplanned counts such steps; this is said once"
            )
        rules, norm = self._parts.rules, None
        try:
            with torch.enable_grad():
                loss: torch.Tensor = self._parts.module(*call.args, **call.kwargs)
                loss.backward()  # type: ignore[no-untyped-call]
            if rules.clip_norm is not None:
                parameters = self._parts.module.parameters()
                norm = nn.utils.clip_grad_norm_(parameters, rules.clip_norm, rules.norm_type)
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad()
        return loss.detach(), norm
