"""The plans of a wrapped model that are ready to run, by kind of call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from memopt.errors import GuardError
from memopt.executor.module import halved_calls, waiting_calls
from memopt.executor.plan_maker import Made
from memopt.models.budget import format_bytes
from memopt.models.warned import warn
from memopt.step.input_values import MOST_PLANS, InputValueError
from memopt.step.inputs import Call

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

_LOG = logging.getLogger(__name__)

_DROPPED = (1, 8, 64, 512)


class ReadyPlans(Sequence["PlanRecord"]):
    """The plans of a wrapped model that are ready to run, the one that ran last at the end. After
    unwrapping, those that were ready.

    Args:
        most: how many stay ready; beyond that, the kind of call that ran longest ago is dropped.

    Attributes:
        lines: a line for each plan that was made, for people.
    """

    def __init__(self, most: int = 0) -> None:
        self._most, self.lines = most, list[str]()
        # Plans of one kind differ in something beside the call; the last used is at the end.
        self._made: OrderedDict[Any, list[Made]] = OrderedDict()
        self._dropped: set[Any] = set()
        self._again = 0
        self._ended: tuple[PlanRecord, ...] = ()

    def _plans(self) -> tuple[PlanRecord, ...]:
        return self._ended or tuple(one.plan for one in self.made())

    def __len__(self) -> int:
        return len(self._plans())

    @overload
    def __getitem__(self, index: int) -> PlanRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlanRecord]: ...

    def __getitem__(self, index: int | slice) -> PlanRecord | Sequence[PlanRecord]:
        return self._plans()[index]

    def __repr__(self) -> str:
        return "\n".join(self.lines) or "no plans yet"

    def made(self) -> Iterator[Made]:
        """Yield all that are ready to run."""
        for found in self._made.values():
            yield from found

    def waiting(self) -> tuple[int, int]:
        """Return how many calls under them await their backward, and how many of these the second
        half of one."""
        made = [one.module for one in self.made()]
        return waiting_calls(*made), halved_calls(*made)

    def of(self, kind: Any) -> list[Made]:
        """Return the plans for a kind of call, the last used one at the end."""
        return list(self._made.get(kind, ()))

    def last_used(self, kind: Any) -> Made | None:
        """Return the one of a kind of call that was used last, which is used now."""
        if kind not in self._made:
            return None
        self._made.move_to_end(kind)
        return self._made[kind][-1]

    def are_enough(self, kind: Any, error: GuardError) -> bool:
        """Return whether no more plans are made of a kind of call, for calls that differ as an
        error says."""
        differ = isinstance(error, InputValueError)
        return differ and len(self._made.get(kind, ())) >= min(MOST_PLANS, self._most)

    def use(self, kind: Any, made: Made) -> None:
        """Make one of a kind of call the one that was used last."""
        self._made[kind] = [*self._without(kind, made), made]

    def add(self, kind: Any, call: Call, made: Made, instead_of: Made | None) -> None:
        """Add a plan for a kind of call, in place of another one; drop the oldest above the
        limit."""
        if kind in self._dropped:
            self._count()
        if instead_of is not None:
            instead_of.stop()
        self._made[kind] = [*self._without(kind, instead_of), made]
        self.note(call, made)
        self._made.move_to_end(kind)
        while sum(map(len, self._made.values())) > self._most:
            oldest, ready = next(iter(self._made.items()))
            ready[0].stop()
            if len(ready) > 1:
                del ready[0]
            else:
                del self._made[oldest]
                self._dropped.add(oldest)

    def _without(self, kind: Any, made: Made | None) -> list[Made]:
        """Return a kind's plans but one. A kind's list is always replaced as a whole, so that
        Ctrl-C leaves no empty list."""
        return [one for one in self._made.get(kind, ()) if one is not made]

    def replace(self, kind: Any, call: Call, made: Made, better: Made) -> None:
        """Replace a plan by a better one for the same calls, and end the search for it."""
        self._made[kind][self._made[kind].index(made)] = better
        made.stop()
        self.note(call, better)

    def note(self, call: Call, made: Made) -> None:
        """Write a line on a plan: shapes of inputs, peak and budget, overhead, strategy."""
        plan, shapes = made.plan, dict.fromkeys(str(list(x.shape)) for x in call.tensors())
        peak, budget = format_bytes(plan.peak_bytes), plan.budget
        if budget is not None:
            whole = format_bytes(budget)
            unit = peak.rpartition(" ")[2]
            same = whole.endswith(f" {unit}")
            peak = f"{peak.removesuffix(f' {unit}') if same else peak} of {whole}"
        self.lines.append(
            f"planned {', '.join(shapes)}: {peak}, {plan.overhead:+.1%}, {plan.strategy.name}"
        )
        _LOG.info("%s", self.lines[-1])

    def end(self) -> None:
        """Drop the ready modules and keep only the records of their plans."""
        self._ended = self._plans()
        for one in self.made():
            one.stop()
        self._made.clear()

    def _count(self) -> None:
        """Count a plan that was ready before; warn where kinds of calls displace each other."""
        self._again += 1
        if self._again in _DROPPED:
            warn(
                f"{self._again} plans were made once more, since more kinds of calls take turns "
                f"than stay ready to run (most_plans={self._most}): raise most_plans= of "
                "memopt.wrap, pad tensors to fewer sizes, or have other kinds run unplanned "
                '(on_mismatch="original")',
            )
