"""A model that cannot be captured whole runs its largest sub-modules that can under plans.

A module that cannot be captured is *open*: its own code runs as the user wrote it, and its
sub-modules are tried at their first calls. So are those of the modules on the way to the line where
the capture failed, without a trace of their own. All parts share one budget
(`memopt.executor.shared_budget`).
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.capture.taken import is_taken
from memopt.capture.training_call import without_keys
from memopt.errors import CaptureError, ProfilerBusyError
from memopt.executor.calls import Calls
from memopt.executor.differentiated import OPENED, OTHER_LOSS, OTHER_OUTPUTS, PARTIAL
from memopt.executor.measured_parts import NothingToSaveError, PartSolver
from memopt.executor.part_maker import MadePart, PartMaker
from memopt.executor.part_names import called_below, is_worthwhile
from memopt.executor.plan_maker import Made, PlanMaker, Planner
from memopt.executor.self_planning import SelfPlanning, planning_of
from memopt.executor.shared_budget import SharedBudget
from memopt.executor.unplanned import passes_on, runs_unplanned, unplanned
from memopt.models.budget import WrittenBudget, format_bytes
from memopt.models.warned import warn
from memopt.step.inputs import Call
from memopt.torch_private import pytree
from memopt.torch_private.engine_hooks import has_engine
from memopt.torch_private.modes import backward_number
from memopt.torch_private.modules import call_goes_elsewhere, plain_call

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

_LOG = logging.getLogger(__name__)

MOST_KINDS = 8
"""Kinds of a part's calls that are planned; a part with more gets sizes that depend on data."""


_INSIDE = (
    "This module is planned by itself, since fully_shard gathers it by itself: memopt.wrap(model, "
    '..., parts="auto") plans what is inside it instead, where it can'
)


class PartPlanning(SelfPlanning):
    """A sub-module that plans its own calls, as a part of a model.

    Attributes:
        refused: why it cannot be captured; "": it can, as far as is known."""

    _in_parts = True

    def __init__(
        self, name: str, module: nn.Module, parts: Parts, most_plans: int, on_mismatch: str
    ) -> None:
        self.name, self.parts, self.refused, self._opens = name, parts, "", ""
        # It learns which outputs of this part the loss uses.
        self.planner = copy.copy(parts.planner)
        self._kinds: set[Any] = set()
        self._idle: set[Any] = set()  # those in which no plan needs less
        super().__init__(module, self.planner, most_plans, on_mismatch, with_state=False)
        self.count_in(parts.calls)
        self.plans.lines = parts.lines

    def _makes_plans(self, alone: bool) -> PlanMaker:
        return PartMaker(self, self.planner, self.parts.shared)

    @property
    def called(self) -> bool:
        """Whether it was called in training."""
        return bool(self._kinds or self._untrained or self.refused)

    @property
    def why_without(self) -> str:
        """Why the part has no plan, although it can be captured."""
        if self._idle:
            return "no plan needs less memory than it does as it is"
        return "nothing to train" if self.called else "not called in training"

    @property
    def ready(self) -> tuple[PlanRecord, ...]:
        """Plans of the part that are ready to run; empty if its sub-modules are planned instead."""
        return () if self.refused else tuple(self.plans)

    def run_again(self, why: str) -> None:
        """Count a call that ran again for its backward. Where the plan has no backward for the
        outputs used, that would happen in each step: the part is opened instead."""
        opens = why is PARTIAL and not self.parts.named
        self._opens = why if opens else self._opens
        why = OTHER_OUTPUTS.format(self.name) if why is OTHER_LOSS else why
        self.calls.take_back(why, OPENED.format(self.name) if opens else None)

    def _running(self, *args: Any, **kwargs: Any) -> Any:
        if self._opens and not self.refused and not runs_unplanned():
            self.parts.open(self.name, self.model, CaptureError(self._opens))
            self.parts.shared.forget()
        if self.refused and not runs_unplanned():
            return plain_call(self.model, *args, **kwargs)
        try:
            return super()._running(*args, **kwargs)
        except CaptureError as error:
            self.parts.open(self.name, self.model, error)
            if not self.refused and has_engine(self.model):
                raise CaptureError(f"{error}. {_INSIDE}") from error
            if not self.refused:
                raise  # named by the user
        gc.collect()  # cycles of the trace that failed hold the call
        return plain_call(self.model, *args, **kwargs)

    def _training_call(self, *args: Any, **kwargs: Any) -> Any:
        shared = self.parts.shared
        if shared.in_call or backward_number() != -1:
            return super()._training_call(*args, **kwargs)
        with unplanned():
            call, kind = self._call_and_kind(args, kwargs)
            shared.calling((self.name, kind), call, alone=True)
        output = super()._training_call(*args, **kwargs)
        shared.around.called((self.name, kind), call, output, None, lambda: None)
        return output

    def _planned(self, kind: Any, call: Call) -> Made | str | None:
        if kind not in self._kinds and len(self._kinds) == MOST_KINDS:
            self.parts.left(self.name, "its inputs have other shapes in every step")
            return None
        if kind in self._idle:
            return None
        try:
            made = super()._planned(kind, call)
        except NothingToSaveError:
            self._idle.add(kind)
            made = None
        except ProfilerBusyError:
            if not self.parts.shared.metered_in_the_way():
                raise
            self.calls.original += 1
            return None
        self._kinds.add(kind)
        return made

    def _ran(self, made: Made, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part = made.part if isinstance(made, MadePart) else None
        if part is None:
            return super()._ran(made, args, kwargs)
        with self.parts.shared.forward(part):
            return super()._ran(made, args, kwargs)

    def _metered_on(self, call: Call) -> torch.device | None:
        return None


class Parts:
    """The parts of a model.

    Args:
        whole: plans the model as a whole.
        budget: of all parts and what lies between them.
        solver, planner: make and apply plans.
        names: the parts that the user named; None: those that can be captured are found.
    """

    def __init__(
        self,
        whole: InParts,
        budget: WrittenBudget,
        solver: PartSolver,
        planner: Planner,
        names: Iterable[str] | None,
        most_plans: int,
        on_mismatch: str,
    ) -> None:
        self.shared = SharedBudget(whole.model, budget, solver, whole.around)
        self.planner, self._whole = planner, whole
        self._most, self._on_mismatch = most_plans, on_mismatch
        self._found: dict[str, PartPlanning] = {}
        self._open: dict[str, str] = {}
        self._left: dict[str, str] = {}
        self._tried, self._offered = 0, list[tuple[str, PartPlanning]]()
        self.named = names is not None
        for name in names or ():
            self._add(name, whole.model.get_submodule(name))

    @property
    def calls(self) -> Calls:
        """The counts of the model's calls."""
        return self._whole.calls

    @property
    def lines(self) -> list[str]:
        """A line for each plan that was made, of the model or of a part."""
        return self._whole.plans.lines

    @property
    def is_open(self) -> bool:
        """Whether the model runs in parts."""
        return self.named or "" in self._open

    @property
    def plans(self) -> tuple[PlanRecord, ...]:
        """The parts' plans that are ready to run."""
        return tuple(plan for part in self._found.values() for plan in part.ready)

    def count_in(self, calls: Calls) -> None:
        """Count the parts' calls in `calls` from now on."""
        for part in self._found.values():
            part.count_in(calls)

    def open(self, name: str, module: nn.Module, error: CaptureError) -> None:
        """Run a module that cannot be captured unplanned, and try to plan its sub-modules."""
        if self.named:
            return
        # The modules on the way to the line that failed cannot be captured either.
        below = [".".join(filter(None, (name, one))) for one in error.modules if one]
        for one in (name, *(x for x in below if x not in self._open)):
            self._open[one] = str(error)
            part = self._found.get(one)
            if part is not None:
                part.refused = str(error)
        for one in (name, *below):
            self._add_below(one, self._whole.model.get_submodule(one))
        if name == "":
            warn(
                f"{error}. Its sub-modules are planned instead where they can be, within one "
                "budget, and what lies between them runs as it is: memopt.running(model).report() "
                "lists both",
            )
        else:
            _LOG.info("%s is planned in parts: %s", name, error)

    def follow(self) -> None:
        """Plan the modules that have replaced parts, or joined open modules, since the last call.
        Removed ones run unplanned."""
        found = [(name, part, self._at(name)) for name, part in self._found.items()]
        gone = [(name, now) for name, part, now in found if now is not part.model]
        for name, now in gone:
            self._found.pop(name).remove()
            self._open.pop(name, None)
            self._left.pop(name, None)
            if now is not None and not call_goes_elsewhere(now):
                self._add(name, now)
        for name in () if self.named else tuple(self._open):
            if (module := self._at(name)) is not None:
                self._add_below(name, module)
        if gone:
            self.shared.forget()

    def _at(self, name: str) -> nn.Module | None:
        try:
            return self._whole.model.get_submodule(name)
        except AttributeError:
            return None

    def look_further(self) -> None:
        """Try to plan the sub-modules of parts that the last step did not call, since other code
        may call these. Leave out modules that are also inside of a planned part."""
        idle = [one for one in self._offered if not (self.named or one[1].called)]
        runs = [part for part in self._found.values() if idle and part.called and not part.refused]
        inside = {one for part in runs for one in part.model.modules()}
        for name, part in idle:
            if part.model not in inside:
                self._add_below(name, part.model)

    def ran(self) -> None:
        """Warn once if a step found no part to plan and nothing more to try."""
        tried, self._tried = self._tried, len(self._open) + len(self._found)
        self._offered = list(self._found.items())
        model = self._whole.model
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if trains and tried == self._tried and not self.calls.planned:
            self.calls.fall_back(
                model,
                "no part of the model is planned (memopt.running(model).report() says why for each)"
                ", and the budget is not kept",
            )

    def left(self, name: str, why: str) -> None:
        """Leave a part's call unplanned, with one notice."""
        self.calls.fall_back(self._found[name].model, f"{name} is not planned: {why}")
        self._left[name] = why

    def remove(self) -> None:
        """Undo the plans of all parts."""
        self.shared.remove()
        for part in self._found.values():
            part.remove()

    def _add_below(self, name: str, module: nn.Module) -> None:
        for full, child in called_below(name, module):
            if full not in self._open and full not in self._found:
                self._add(full, child)

    def _add(self, name: str, module: nn.Module) -> None:
        if call_goes_elsewhere(module):
            if not self.named and planning_of(module) not in self._found.values():
                self._left[name] = "its calls are taken already (wrapped or compiled by itself)"
            elif self.named:
                raise ValueError(f"{name!r}: leave out its compile(), and wrap or name it once")
        elif self.named or is_worthwhile(module):
            self._found[name] = PartPlanning(name, module, self, self._most, self._on_mismatch)

    def report(self) -> str:
        """Write a line for each part, then what runs as it is."""
        lines, others = [], []
        for name, part in self._found.items():
            for plan in part.ready:
                how = f"{plan.strategy.name}, peak {format_bytes(plan.peak_bytes)}"
                lines.append(f"planned: {name}: {how}")
            if name not in self._left and not part.refused and not part.plans:
                others.append(f"not planned: {name}: {part.why_without}")
        others += [f"not planned: {name}: {why}" for name, why in self._left.items()]
        peak_bytes = self.shared.peak_bytes()
        head = f"{len(lines)} plans of parts"
        if peak_bytes is not None:
            head += f", a step of {format_bytes(peak_bytes)} with what lies between them"
        opened = [f"runs as it is: {n or 'the model'}: {why}" for n, why in self._open.items()]
        return "\n".join([head, *lines, *others, *opened])


class InParts(SelfPlanning):
    """A model that plans its own calls, in parts if it cannot be captured whole."""

    _in_parts = True

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        most_plans: int,
        on_mismatch: str,
        budget: WrittenBudget,
        solver: PartSolver,
        names: Iterable[str] | None,
    ) -> None:
        super().__init__(model, planner, most_plans, on_mismatch, with_state=True)
        self.parts = Parts(self, budget, solver, planner, names, most_plans, on_mismatch)

    def report(self) -> str:
        """Write a line for each part: its plan, or why it has none. Without parts, the plans."""
        return self.parts.report() if self.parts.is_open else f"not in parts: {self.plans!r}"

    def count_in(self, calls: Calls) -> None:
        """Count later calls in `calls`, those of the parts included."""
        super().count_in(calls)
        self.parts.count_in(calls)

    def remove(self) -> None:
        """Undo the wrap."""
        self.parts.remove()
        super().remove()

    def _running(self, *args: Any, **kwargs: Any) -> Any:
        self.around.settled |= torch.is_grad_enabled()
        if passes_on(self.model) or not (self.model.training and torch.is_grad_enabled()):
            return super()._running(*args, **kwargs)
        if not self.parts.is_open:
            try:
                return super()._running(*args, **kwargs)
            except CaptureError as error:
                self.parts.open("", self.model, error)
                self.around.metered_whole()
            gc.collect()  # cycles of the trace that failed hold the call
        return self._run_in_parts(args, kwargs)

    def _kind(self, call: Call) -> Any:
        if self.parts.is_open and not all(map(is_taken, call.leaves)):
            # What its parts do not get may be anything.
            args, kwargs = pytree.tree_map(_or_its_class, (call.args, call.kwargs))
            call = replace(call, args=args, kwargs=kwargs)
        return super()._kind(call)

    def _run_in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A block cannot add its keys to what it is called with.
        kwargs = without_keys(self.model, args, kwargs)
        with unplanned():
            call, kind = self._call_and_kind(args, kwargs)
            self.parts.follow()
            self.parts.look_further()
            self.parts.shared.calling(kind, call)
        with self.parts.shared.call():
            output = plain_call(self.model, *args, **kwargs)
        self.around.called(kind, call, output, None, lambda: None)
        self.parts.ran()
        return output


def _or_its_class(leaf: Any) -> Any:
    """Return an argument that memopt takes, else the name of its class."""
    return leaf if is_taken(leaf) else type(leaf).__qualname__
