"""Runs one planned step on several ranks together: all start the same plan, and a failure on one of
them ends the step on all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memopt.errors import ExecutionError, RankError
from memopt.executor.partial_backward import Partial, PartialBackward
from memopt.executor.runtime import Installed
from memopt.models.graph import Graph
from memopt.models.reader import digest
from memopt.models.same_graph import graph_difference
from memopt.programs.serialize import dumps, fingerprint
from memopt.step.rank_errors import is_of_group, lost
from memopt.step.ranks import Ranks

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


APPLYING = "a plan is applied"


@dataclass
class InStep:
    """The ranks of a planned module.

    Attributes:
        ranks: the ranks that run it.
        failed: how a step of this rank failed; "": none did.
    """

    ranks: Ranks
    failed: str = ""

    def check_plan(self, plan: PlanRecord) -> None:
        """Raise RankError on every rank, which says what differs, unless all are to run the same
        program."""
        structure = replace(plan.graph, extra_resident_bytes=0, boundary_bytes=0)
        same = digest([fingerprint(structure), dumps(plan.program).decode()])
        if len(set(self.ranks.exchanged(same, APPLYING))) == 1:
            return
        instructions = [str(one) for one in plan.program.instructions]
        everyone = self.ranks.exchanged((structure, instructions, plan.peak_bytes), APPLYING)
        first, members = everyone[0], self.ranks.members
        for rank, other in zip(members, everyone, strict=True):
            found = _difference(first, other, f"rank {members[0]}", f"rank {rank}")
            if found:
                raise RankError(
                    f"the ranks do not have the same plan: {found}. Apply, on every rank, what "
                    "memopt.plan or memopt.wrap returned there for the same call, or one plan file"
                )

    def installed(self, program: Installed) -> Installed:
        """Wrap the program, so that its halves fail on all ranks if they fail on one."""
        return replace(
            program,
            forward=self._failing(program.forward, "the forward"),
            backward=self._failing(program.backward, "the backward"),
            handover=None,
            partial=self._partial(program.partial),
        )

    def _partial(self, find: Partial) -> Partial:
        def found(missing: frozenset[int]) -> PartialBackward | None:
            one = find(missing)
            if one is None or one.run is None:
                return one
            return replace(one, run=self._failing(one.run, "the backward"))

        return found

    def _failing(self, run: Callable[..., Any], part: str) -> Callable[..., Any]:
        def runs(*arguments: Any) -> Any:
            if self.failed:
                raise ExecutionError(
                    f"a step failed on this rank ({self.failed}), and the ranks are not in step "
                    "any more: start them again from the last checkpoint"
                )
            try:
                return run(*arguments)
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
                if not is_of_group(error):
                    self.ranks.report_failure(f"in {part} of a planned step: {self.failed}")
                    raise
                reported = self.ranks.reported_failure()
                if reported is None:
                    raise lost(error, f"{part} of a planned step runs") from error
                raise RankError(f"{reported}. The step is over on every rank") from error

        return runs


_Shown = tuple[Graph, list[str], int]
"""A plan's graph, its instructions as text, and its peak in bytes."""


def _difference(one: _Shown, other: _Shown, here: str, there: str) -> str:
    """Return the first difference between the plans of two ranks, for people; "": there is none."""
    graph = graph_difference(one[0], other[0]) or graph_difference(other[0], one[0])
    if graph is not None:
        return f"{here} and {there} plan different graphs: {graph}"
    if (one[1], one[2]) == (other[1], other[2]):
        return ""
    pairs = enumerate(itertools.zip_longest(one[1], other[1], fillvalue="nothing more"))
    differ = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
    peaks = f"{here} has a peak of {one[2]} bytes, {there} of {other[2]}"
    if differ is None:
        return f"{peaks}, with tensors at other addresses"
    number, mine, yours = differ
    return f"{peaks}; at instruction {number} {here} has {mine}, {there} {yours}"
