"""Warns of gradients that a loop gives to `backward()` and holds until that is over, for which the
budget of an applied plan has no room. (`memopt.wrap` charges them.)"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memopt.executor.held_memory import Memory, memory_of, size_of, still_held
from memopt.models.budget import format_bytes
from memopt.models.charges import Charges
from memopt.models.warned import warn
from memopt.programs.charged import needed_bytes
from memopt.step.backend import backend_of
from memopt.torch_private.modes import when_backward_is_over

if TYPE_CHECKING:
    from memopt.executor.runtime import Arrived
    from memopt.plan_record import PlanRecord


def warning_of_given(plan: PlanRecord) -> Arrived | None:
    """Return a function to call when the backwards of a planned module begin; None if the budget
    has room for all gradients of the outputs, or there is no budget."""
    graph = plan.graph
    if plan.budget is None or not graph.tangents or graph.tangents_held:
        return None
    more_bytes = needed_bytes(graph, plan.program, Charges(given_gradients=1)) - plan.budget
    if more_bytes <= 0:
        return None
    given_bytes = sum(graph.tensors[one].size_bytes for one in set(graph.tangents))
    return _HeldOrNot(plan.budget, more_bytes, given_bytes).arrived


class _HeldOrNot:
    """Checks whether the loop holds the gradients of outputs, until it has warned.

    Args:
        budget_bytes: the budget of the plan.
        more_bytes: what a step needs beyond that while the loop holds all of these gradients.
        given_bytes: the bytes of these gradients.
    """

    def __init__(self, budget_bytes: int, more_bytes: int, given_bytes: int) -> None:
        self._budget_bytes, self._more_bytes = budget_bytes, more_bytes
        self._given_bytes, self._told = given_bytes, False

    def arrived(self, tangents: list[Any], *_: Any) -> None:
        """Check, once the present backward is over, whether the loop still holds its gradients."""
        given = [one for one in tangents if one is not None]
        if given and not self._told:
            # The bytes of a number are charged in every step.
            least = backend_of(given[0].device).step_scalars_bytes
            when_backward_is_over(partial(self._over, memory_of(given), least))

    def _over(self, tangents: Memory, least_bytes: int) -> None:
        if self._told or size_of(still_held(tangents)) <= least_bytes:
            return
        self._told = True
        warn(
            "backward() was given gradients that the loop holds until it is over, where the plan "
            f"lets them go: a step may exceed its budget of {self._budget_bytes} bytes by up to "
            f"{format_bytes(self._more_bytes)}. memopt.wrap(model, budget) charges what the loop "
            f"holds; for a plan, leave {self._given_bytes} bytes of the budget free",
        )
