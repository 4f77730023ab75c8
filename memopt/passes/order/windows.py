"""Steps at which tasks may run and values may be live (OLLA §4.1 to §4.3), for programs with a
variable for each of them.

One task runs at each of the steps 0..n-1, so that the numbers of a task's ancestors and descendants
limit its place. The paper's longest distances, which allow several at once, give wider windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memopt.passes.order.tasks import Tasks, Value, mask_of


@dataclass(frozen=True)
class Windows:
    """The windows of a problem's tasks and edges. Edges are its values, then one without bytes (a
    control edge) for each further precedence."""

    tasks: Tasks

    @cached_property
    def edges(self) -> tuple[Value, ...]:
        """Return the values and the control edges."""
        tasks = self.tasks
        linked = {(value.producer, reader) for value in tasks.values for reader in value.consumers}
        control = [
            Value(0, earlier, (task,))
            for task, before in enumerate(tasks.after)
            for earlier in before
            if (earlier, task) not in linked
        ]
        return (*tasks.values, *control)

    def span(self, task: int) -> range:
        """Return the steps at which a task may run: SPAN (eq. 10)."""
        last = len(self.tasks) - 1
        ancestors, descendants = self.tasks.ancestors[task], self.tasks.descendants[task]
        return range(ancestors.bit_count(), last - descendants.bit_count() + 1)

    def useful(self, edge: Value) -> range:
        """Return the steps at which an edge may be kept for a reader: MUL (eq. 11)."""
        return range(self.span(edge.producer).start + 1, self._end(edge, latest=True))

    def preserved(self, edge: Value) -> range:
        """Return the steps at which an edge is kept in every order: PRES (eq. 12)."""
        return range(self.span(edge.producer).stop, self._end(edge, latest=False))

    def _end(self, edge: Value, *, latest: bool) -> int:
        """Return the step after the last at which an edge may be kept, or must be."""
        if edge.kept:
            return len(self.tasks)
        spans = map(self.span, edge.consumers)
        return max((x.stop if latest else x.start + 1 for x in spans), default=0)

    def lasting(self, edge: Value) -> range:
        """Return the steps at which an edge may be in memory: while it is made, or kept."""
        made = self.span(edge.producer)
        return range(made.start, max(made.stop, self.useful(edge).stop))

    def never_meet(self, one: Value, other: Value) -> bool:
        """Tell whether two values are in memory together in no order (§4.2): all readers of one run
        before the other's producer (Function 2, whose answers `Tasks.ancestors` holds), or their
        windows are apart."""
        first, second = self.lasting(one), self.lasting(other)
        if first.stop <= second.start or second.stop <= first.start:
            return True
        return self._precedes(one, other) or self._precedes(other, one)

    def _precedes(self, one: Value, other: Value) -> bool:
        users = mask_of((one.producer, *one.consumers))
        return not one.kept and users & ~self.tasks.ancestors[other.producer] == 0
