"""Runs one planned step on several ranks together: all start the same plan, and a failure on one of
them ends the step on all."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed

from memopt.errors import RankError
from memopt.executor.handover import Handed, Yielding
from memopt.executor.installed import Installed
from memopt.executor.partial_backward import Partial, PartialBackward
from memopt.executor.undo import Changes
from memopt.models.graph import Graph
from memopt.models.reader import digest
from memopt.models.same_graph import graph_difference
from memopt.programs.serialize import dumps, fingerprint
from memopt.step.assumed import AssumptionError, nothing_assumed
from memopt.step.rank_errors import is_of_group, lost
from memopt.step.rank_groups import all_are_here, note_here
from memopt.step.ranks import Ranks
from memopt.torch_private.distributed import if_backward_fails

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


APPLYING = "a plan is applied"


@dataclass
class InStep:
    """The ranks of a planned module, or of a whole step.

    Attributes:
        ranks: the ranks that run it.
        step: the number of this rank's last call of a whole step, from 1.
        refused: why this rank did not run that call; "": it did.
        key: of the step among others, the same on all ranks.
        otherwise: whether the last forward went another way than assumed on every rank.
    """

    ranks: Ranks
    step: int = 0
    refused: str = ""
    key: str = ""
    otherwise: bool = False

    def check_plan(self, plan: PlanRecord) -> None:
        """Raise RankError on every rank, which says what differs, unless all are to run the same
        program."""
        structure = replace(plan.graph, extra_resident_bytes=0, boundary_bytes=0)
        same = digest([fingerprint(structure), dumps(plan.program).decode()])
        self.ranks.forget_failure()
        known = self.ranks.exchanged((same, uuid.uuid4().hex), APPLYING)
        self.key = f"memopt/refused/{known[0][1]}"
        if len({one for one, _ in known}) == 1:
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
            look=self._agreed(program.look),
            failing=self._unplanned,
            backward=self._failing(program.backward, "the backward"),
            handover=None,
            partial=self._partial(program.partial),
            in_halves=program.in_halves and self._in_halves(program.in_halves),
        )

    def _in_halves(self, run: Yielding) -> Yielding:
        def running(*arguments: Any) -> Iterator[Handed]:
            half = partial(next, run(*arguments), None)
            return iter(self._failing(half, "the backward"), None)

        return running

    def _agreed(self, look: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Make a call run unplanned on all ranks if a branch of one goes otherwise than assumed."""
        if look is nothing_assumed:
            return look

        def told(outputs: list[Any]) -> list[str]:
            found = ""
            try:
                look(outputs)
            except AssumptionError as error:
                found = str(error)
            return self.ranks.exchanged(found, "a forward looks at its values")

        ask = self._failing(told, "the forward")

        def looks(outputs: list[Any]) -> None:
            answers = ask(outputs)
            self.otherwise = all(answers)
            for rank, why in zip(self.ranks.members, answers, strict=True):
                if why:
                    raise AssumptionError(f"rank {rank}: {why}")

        return looks

    def _unplanned(self, run: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Make a function that all ranks run fail on all, also where only some wait in it. If it
        fails on each by itself, they are in step as before."""

        def together(*arguments: Any, **named: Any) -> tuple[Any, Exception | None, list[str]]:
            found, own, how = None, None, ""
            try:
                found = run(*arguments, **named)
            except Exception as error:
                if not self.otherwise or is_of_group(error):
                    raise  # others may be amid its collectives
                own, how = error, f"{type(error).__name__}: {error}"
            try:
                told = self.ranks.exchanged(how, "a forward runs unplanned")
            except RankError as error:
                raise own or error.__cause__ or error from None  # why is told as that of a step
            if own and not all(told):
                raise own
            return found, own, told

        failing = self._failing(together, part)

        def runs(*arguments: Any, **named: Any) -> Any:
            found, own, told = failing(*arguments, **named)
            if own is not None:
                raise own
            for rank, how in zip(self.ranks.members, told, strict=True):
                if how:
                    there = f"rank {rank} failed in {part} of a planned step: {how}"
                    self.ranks.group.failed = there
                    raise RankError(_OVER.format(there))
            self.runs_unplanned()
            return found

        return runs

    def runs_unplanned(self) -> None:
        """Make the backward of a call that ran unplanned on all ranks fail on all."""
        if_backward_fails(partial(self._told, part="the unplanned backward of a planned step"))

    def _partial(self, find: Partial) -> Partial:
        def found(missing: frozenset[int]) -> PartialBackward | None:
            one = find(missing)
            if one is None or one.run is None:
                return one
            halves = one.in_halves and self._in_halves(one.in_halves)
            return replace(one, run=self._failing(one.run, "the backward"), in_halves=halves)

        return found

    def _failing(self, run: Callable[..., Any], part: str) -> Callable[..., Any]:
        def runs(*arguments: Any, **named: Any) -> Any:
            self.ranks.group.check_in_step()
            try:
                return run(*arguments, **named)
            except BaseException as error:
                told = self._told(error, f"{part} of a planned step")
                if told is error:
                    raise
                raise told from error

        return runs

    @contextmanager
    def whole_step(self, changes: Changes) -> Iterator[None]:
        """Enter a whole step: what ends it on this rank, Ctrl-C too, ends it on all ranks.

        Raises:
            ExecutionError: a step failed on this rank.
            RankError: this rank refused the call before, and others did not.
        """
        self.ranks.group.check_in_step()
        if self.refused and not all_are_here(f"{self.key}/{self.step}", self.ranks.members):
            self.ranks.group.failed = f"{self.refused}, which other ranks did not refuse"
            raise RankError(_OVER.format(self.ranks.group.failed))
        self.step, self.refused = self.step + 1, ""
        try:
            yield
        except BaseException as error:
            if changes.complete:  # Ctrl-C has waited for the end: the others wait in the next step
                self.ranks.report_failure(f"ended: {type(error).__name__}", self.step + 1)
            else:
                self._told(error, "a planned step")
            raise

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this one, that it does not run a call."""
        if self.ranks.group.failed:
            return
        self.step += 1
        self.refused = f"rank {torch.distributed.get_rank()} refused its call: {error}"
        note_here(f"{self.key}/{self.step}")
        self.ranks.report_failure(f"refused its call: {error}", self.step)

    def _told(self, error: BaseException, part: str) -> BaseException:
        """Tell the other ranks of an error; return the one to raise here."""
        if self.ranks.group.failed:
            return error
        told = error
        if isinstance(error, Exception) and is_of_group(error):
            reported = self.ranks.reported_failure()
            if reported is None:
                told = lost(error, f"{part} runs", self.ranks.members)
            elif 0 < reported[0] < self.step:
                told = RankError(f"{reported[1]}. {_AHEAD}")
            else:
                told = RankError(_OVER.format(reported[1]))
        self.ranks.group.failed = how = f"{type(told).__name__}: {told}"
        elsewhere = isinstance(error, RankError) and self.ranks.reported_failure() is not None
        if told is error and not elsewhere:
            there = self.ranks.report_failure(f"failed in {part}: {how}", self.step)
            self.ranks.group.failed = there
            error.add_note(_OVER.format(there))
        return told


_OVER = "{}. The step is over on every rank"
_AHEAD = (
    "This rank had done that step, and is one ahead of it: start all ranks again from the last "
    "checkpoint"
)

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
