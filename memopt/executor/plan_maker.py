"""Makes plans of a wrapped model within its budget, charging what the loop around it holds.

A plan charges the memory measured around the steps so far. Gradients held at a forward are charged
for the whole step, as accumulation needs them. If no plan fits then, they are charged until the
backward: a loop that does not drop them in between (Lightning does) gets an error.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from memopt.errors import InfeasibleBudgetError
from memopt.executor.arena import ArenaFamily
from memopt.executor.held_memory import bytes_of, is_metered
from memopt.executor.module import OnMismatch, PlannedModule, waiting_calls, when_arrived
from memopt.executor.pipeline_stages import accumulating
from memopt.executor.surroundings import Surroundings
from memopt.models.budget import format_bytes
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.warned import warn
from memopt.programs.charged import backward_bytes, needed_bytes
from memopt.step.described import described, described_text
from memopt.step.inputs import Call
from memopt.step.ranks import ranks_of
from memopt.step.shards import held_gradients

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

AGAIN = 4
"""Most times that a plan is made again because more was met around its steps."""


@dataclass(frozen=True)
class Asked:
    """The conditions of a plan to be made.

    Attributes:
        holding: whether the parameters' gradients are held for the whole step.
        charges: memory charged beside the step.
        budget_bytes: replaces the user's budget; None: that.
    """

    holding: bool
    charges: Charges = NO_CHARGES
    budget_bytes: int | None = None


class BetterPlan(Protocol):
    """A search, in a process of its own, for a better plan than the one that runs."""

    @property
    def ended(self) -> bool:
        """Tell whether it has ended."""

    def better(self) -> PlanRecord | None:
        """Return the better plan of a search that has ended, if it found one; as often as asked."""

    def stop(self) -> None:
        """Give the search up."""


class Planner(Protocol):
    """Makes plans as requested, for a loss that uses the leaves `outputs` of the output, if any."""

    outputs: frozenset[int]

    def __call__(
        self, model: nn.Module, call: Call, asked: Asked, instead: OnMismatch, family: ArenaFamily
    ) -> tuple[PlannedModule, PlanRecord]:
        """Return the model under a plan for such calls, and that plan.

        Args:
            model, call, asked: the plan's model, kind of call and conditions.
            instead: handles other calls.
            family: programs whose idle arena it may use, if it has addresses.

        Raises:
            InfeasibleBudgetError: no plan fits the budget.
        """
        ...

    def charges_loss(self, call: Call) -> bool:
        """Return whether plans for such calls charge the loss that they are trained with."""
        ...

    def guesses_loss(self, call: Call) -> bool:
        """Return whether plans for such calls are for a loss that the user did not name."""
        ...

    def train_with(self, outputs: frozenset[int]) -> None:
        """Make later plans for a loss that also uses these leaves of the output."""
        ...

    def promises(self) -> bool:
        """Return whether the user asked for a certain budget, not for none or the smallest."""
        ...

    def improving(
        self, model: nn.Module, call: Call, asked: Asked, plan: PlanRecord, beside_bytes: int
    ) -> BetterPlan | None:
        """Begin to look for a better plan than the one made for `asked`, which leaves so many bytes
        of the budget for what is beside the step; None: there is nothing to look for."""
        ...

    def apply(
        self,
        plan: PlanRecord,
        model: nn.Module,
        call: Call,
        instead: OnMismatch,
        family: ArenaFamily,
    ) -> PlannedModule:
        """Return the model under a plan that is made."""
        ...


@dataclass(eq=False)
class Made:
    """A plan that is ready to run.

    Attributes:
        module: the model under the plan.
        plan: the plan.
        charges: memory that it charges beside the step.
        enough: the largest charges for which it need not be made again.
        again: how often it was made again because more memory was measured around its steps.
        search: for a better plan; None: there is none.
        once: whether it charges memory that is held only beside the step in which it is made.
    """

    module: PlannedModule
    plan: PlanRecord
    charges: Charges
    enough: Charges
    once: bool = False
    again: int = 0
    search: BetterPlan | None = None
    _spare: tuple[Charges, int] | None = None

    def over_bytes(self, charges: Charges) -> int:
        """Return by how much its steps and the memory around them exceed its budget."""
        plan = self.plan
        if plan.budget is None:
            return 0
        more = replace(charges.beyond(self.charges), held_bytes=self.charges.held_bytes)
        return needed_bytes(plan.graph, plan.program, more) - plan.budget

    def spare_bytes(self) -> int | None:
        """Return what its steps and the memory around them leave of its budget; None: no limit."""
        if self._spare is None or self._spare[0] != self.enough:
            self._spare = self.enough, max(0, -self.over_bytes(self.enough))
        return None if self.plan.budget is None else self._spare[1]

    def stop(self) -> None:
        """Look for no better plan."""
        if self.search is not None:
            self.search.stop()
            self.search = None


class PlanMaker:
    """Makes the plans of a wrapped model, and warns when they exceed the budget."""

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        around: Surroundings,
        alone: bool,
        instead: OnMismatch,
        family: ArenaFamily,
    ) -> None:
        self._model, self._planner, self._around, self.alone = model, planner, around, alone
        self._instead, self._family = instead, family
        self._kinds: dict[Any, int] = {}
        self._calls = 0  # since the last plan was made
        self._told: set[str] = set()

    def made(self, kind: Any, holding: bool, call: Call, beside: Charges = NO_CHARGES) -> Made:
        """Make a plan for a kind of call that charges the memory measured around its steps, and
        `beside`. If none fits, make the plan of least memory, with a warning.

        Raises:
            InfeasibleBudgetError: the step alone is beyond the budget.
        """
        self._kinds.setdefault(kind, len(self._kinds))
        self._calls = 0
        certain = self._largest(self._around.certain())
        charges = self._largest(self._around.charges(kind).plus(beside))
        try:
            made = self._asked(kind, holding, call, charges)
        except InfeasibleBudgetError as error:
            if charges == certain:
                raise self._beyond(error, holding, call) from error
            budget_bytes, least = error.budget_bytes, error.smallest_budget_bytes
        else:
            made.once = bool(beside) and made.plan.overhead > 0
            return made
        try:
            made = self._asked(kind, holding, call, certain)
        except InfeasibleBudgetError as error:
            raise self._beyond(error, holding, call) from error
        if least is not None:
            made = self._asked(kind, holding, call, charges, least)
        made.enough, made.once = charges, bool(beside)
        remedy = "" if least is None else f": give at least budget={least}"
        self._tell(
            "beyond",
            f"steps with {shown(call)} exceed their budget of {budget_bytes} bytes: no plan leaves "
            f"room for what was measured around them ({', '.join(charges.listed())}){remedy}. The "
            "plan that needs least runs instead",
        )
        return made

    def improved(self, made: Made, kind: Any, call: Call) -> Made | None:
        """Return the better plan that was found in the meantime, ready to run, if there is one."""
        if made.search is None or not made.search.ended:
            return None
        try:
            plan = made.search.better()
            found = None if plan is None else replace(made, plan=plan, search=None)
            if found is None or found.over_bytes(self._around.charges(kind)) > 0:
                made.stop()
                return None
            apply = partial(self._planner.apply, found.plan, self._model, call)
            found.module = apply(self._instead, self._family)
        except Exception:  # after Ctrl-C the next call takes it over
            made.stop()
            raise
        when_arrived(found.module, partial(self._arrived, kind, weakref.ref(found)))
        return found

    def keeps(self, made: Made, kind: Any, call: Call) -> bool:
        """Return whether a plan stays: it keeps its budget with the memory measured around its
        steps, was replaced often enough, or cannot be made anew now. If not, count one."""
        if made.once:
            return not self._around.can_measure(call)
        charges = self._around.charges(kind)
        if not self.alone:
            self._calls += 1
            if not is_metered(self._calls):
                return True
            charges = self._largest(charges, self._kinds[kind])
        enough = charges.largest(made.enough)
        if enough == made.enough or made.over_bytes(charges) <= 0:
            made.enough = enough
            return True
        can_plan = self._around.can_measure(call)  # only now: it ends what is being metered
        if self.alone and not can_plan:
            return True
        last = made.again == AGAIN
        if last or charges.waiting_calls > made.charges.waiting_calls:
            self.met(kind, made)
        if last:
            return True
        made.again += 1
        return not can_plan

    def _largest(self, own: Charges, kind: int = 0) -> Charges:
        """Return the largest of each charge on any rank; none if ranks run calls of other kinds."""
        ranks = None if self.alone else ranks_of(self._model)
        if ranks is None:
            return own
        ranks.group.check_in_step()  # else it would wait for the others
        told = ranks.exchanged((kind, own), "what is met around a step is charged")
        alike = all(one == kind for one, _ in told)
        return reduce(Charges.largest, (one for _, one in told)) if alike else NO_CHARGES

    def met(self, kind: Any, made: Made) -> None:
        """Warn, once, if a plan's step and the memory around it have exceeded the budget."""
        charges = self._around.charges(kind)
        over_bytes = made.over_bytes(charges)
        if over_bytes <= 0 or not self._planner.promises():
            return
        last = made.again == AGAIN
        then = "It was planned again often enough and stays" if last else "The next one charges it"
        self._tell(
            f"met, {then}",
            f"a step needed up to {format_bytes(over_bytes)} more than its budget of "
            f"{made.plan.budget} bytes, for memory that its plan did not know of "
            f"({', '.join(charges.listed())}). {then}; with loss_fn= memopt knows your loss before "
            "the first step",
        )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(text)

    def _asked(
        self,
        kind: Any,
        holding: bool,
        call: Call,
        charges: Charges,
        budget_bytes: int | None = None,
    ) -> Made:
        """Make a plan with gradients held for the whole step, if they are held when it begins; if
        none fits, one with gradients that are dropped before the backward.

        Raises:
            InfeasibleBudgetError: neither fits; the error of the first.
        """
        try:
            made = self._planned(call, Asked(holding, charges, budget_bytes))
        except InfeasibleBudgetError as error:
            if not holding or not self.alone or accumulating():
                raise
            held_bytes = bytes_of(held_gradients(self._model))
            until_backward = replace(charges, held_bytes=held_bytes)
            try:
                made = self._planned(call, Asked(False, until_backward, budget_bytes))
            except InfeasibleBudgetError:
                raise error from None
            made.stop()
            given = kind, weakref.ref(made), error.smallest_budget_bytes
            when_arrived(made.module, partial(self._arrived_dropping, *given))
            return made
        when_arrived(made.module, partial(self._arrived, kind, weakref.ref(made)))
        return made

    def _planned(self, call: Call, asked: Asked) -> Made:
        module, plan = self._planner(self._model, call, asked, self._instead, self._family)
        if self.alone and ranks_of(self._model) is not None:
            self.alone = False  # its graph has shown that other ranks run it, too
        charges = self._largest(asked.charges)
        made = Made(module, plan, charges, charges)
        if self.alone:
            # The other charges are in the plan's graph.
            needs_bytes = needed_bytes(plan.graph, plan.program, asked.charges.beside())
            beside_bytes = max(0, needs_bytes - plan.peak_bytes)
            made.search = self._planner.improving(self._model, call, asked, plan, beside_bytes)
        return made

    def _beyond(
        self, error: InfeasibleBudgetError, holding: bool, call: Call
    ) -> InfeasibleBudgetError:
        """Return the error for a call that no plan within the budget can run. It names the budget
        that wrapping needs: for later calls, too, which find gradients of earlier ones."""
        least = alone = error.smallest_budget_bytes
        if not holding:
            try:
                self._planned(call, Asked(True, self._around.certain()))
            except InfeasibleBudgetError as other:
                least = other.smallest_budget_bytes or least
            except ValueError:  # gradients of a whole step are not kept
                pass
        remedy = "" if least is None else f": give at least budget={least}"
        if least != alone:
            remedy += f" ({alone} if gradients are never there when a forward begins)"
        text = f"calls with {shown(call)} are beyond the budget of the wrapped model{remedy}"
        return InfeasibleBudgetError(f"{text}. {error}", error.budget_bytes, least)

    def _arrived(self, kind: Any, ran: weakref.ref[Made], *arrived: Any) -> None:
        """Begin the backward of a planned call; warn if the memory held then exceeds its budget."""

        def met() -> None:
            if (made := ran()) is not None:
                self.met(kind, made)

        tangents, _, kept = arrived
        self._around.arrived(kind, tangents, met, kept)

    def _arrived_dropping(
        self, kind: Any, ran: weakref.ref[Made], least: int | None, *arrived: Any
    ) -> None:
        """Begin the backward of a planned call that has no room for gradients.

        Raises:
            InfeasibleBudgetError: gradients are held that do not fit.
        """
        self._arrived(kind, ran, *arrived)
        held_bytes, made = bytes_of(held_gradients(self._model)), ran()
        if made is None or made.plan.budget is None or not held_bytes:
            return
        plan, budget_bytes = made.plan, made.plan.budget
        others = waiting_calls(made.module) - 1
        beside = Charges(waiting_calls=others).plus(arrived[-1])
        if held_bytes + backward_bytes(plan.graph, plan.program, beside) <= budget_bytes:
            return
        remedy = "" if least is None else f"give at least budget={least}, or "
        raise InfeasibleBudgetError(
            f"a backward is to add to gradients of {format_bytes(held_bytes)}, for which the plan "
            f"within {budget_bytes} bytes has no room: {remedy}call zero_grad() between the "
            "forward and the backward",
            budget_bytes,
            least,
        )


def shown(call: Call) -> str:
    """Return the tensors of a call, for messages."""
    found = [described_text(described(leaf)) for leaf in call.tensors()]
    return ", ".join(text.partition(" stride")[0] for text in found)
