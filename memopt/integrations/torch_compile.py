"""`torch.compile(model, backend="memopt", options={"budget": "8GiB", "strategy": "auto"})`.

Dynamo passes a graph for every part of the model between graph breaks. Each graph is planned at its
first call with a kind of inputs; inputs of other shapes are another kind, for which known kernels
need not be measured again. Calls without gradients run unplanned.

The budget is for the whole step. If a step has several graphs, their inputs are charged once; while
one graph runs, the others hold their saved tensors or their gradients. Each graph's budget lies the
same share of the way from its smallest peak to its store-all's; that share is the largest with
which the step is within the budget. All graphs of a step are known only after its first run: in
that run, the first graphs may take the memory of later ones.

Parts that Dynamo runs uncompiled never become a graph. memopt warns about them, or refuses them
with `options={"strict": True}`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.api.forward_again import small_plans
from memopt.api.plan import Plan
from memopt.api.planning import plan
from memopt.errors import CaptureError, InfeasibleBudgetError, NothingToTrainError
from memopt.executor.equal_share import by_kind, chosen
from memopt.executor.module import waiting_calls
from memopt.integrations.custom_functions import with_custom_functions
from memopt.integrations.skipped_frames import SkippedFrame, hear_skipped_frames
from memopt.models.budget import MINIMUM, WrittenBudget, format_bytes, parse_budget
from memopt.programs.lifetimes import lifetimes
from memopt.step.backend import autocast_state
from memopt.torch_private.dynamo import compiled_code_kept
from memopt.torch_private.modes import function_modes_off

_LOG = logging.getLogger(__name__)
_SOLVING = ("strategy", "host_budget", "device", "order", "place", "time_limit_s")
_OPTIONS = ("budget", *_SOLVING, "kernels", "optimizer", "cache", "progress", "strict")


@dataclass(eq=False)
class PlannedGraph:
    """One graph of a compiled model, for one kind of inputs.

    Attributes:
        name: where the graph begins in the user's code.
        module: the graph.
        first: its store-all plan.
        small: its plans that need little.
        storages: bytes of each storage of its inputs, by address.
        plan: the plan for its next call.
        run: the graph under `runs`, the plan of its last call.
    """

    name: str
    module: nn.Module
    first: Plan
    small: tuple[Plan, ...]
    storages: dict[int, int]
    plan: Plan
    runs: Plan
    run: nn.Module


@dataclass(eq=False)
class CompiledStep:
    """The graphs of one `torch.compile(..., backend="memopt")`.

    Attributes:
        options: as passed to `torch.compile`.
        graphs: those of the last whole step, each with the most calls that awaited their backwards
            at once.
        skipped: the parts that Dynamo runs uncompiled, without a plan.
        without_gradients: how many calls ran unplanned, since they had nothing to train.
    """

    options: Mapping[str, Any]
    graphs: dict[PlannedGraph, int] = field(default_factory=dict)
    skipped: list[SkippedFrame] = field(default_factory=list)
    without_gradients: int = 0
    _now: dict[PlannedGraph, int] = field(default_factory=dict)
    _divided: dict[PlannedGraph, int] = field(default_factory=dict)
    _known: dict[frozenset[tuple[PlannedGraph, int]], Mapping[PlannedGraph, Plan]] = field(
        default_factory=dict
    )

    def report(self) -> str:
        """Write a line for each graph of the last step: where it begins, and its plan; and one for
        each part that Dynamo runs uncompiled."""
        count = len(self.graphs)
        lines = [f"{count} graph{'s' * (count != 1)}, {max(0, count - 1)} breaks between them"]
        for number, (one, times) in enumerate(self.graphs.items(), 1):
            peak = format_bytes(one.plan.peak_bytes)
            often = f", {times} at a time" if times > 1 else ""
            lines.append(f"{number}. from {one.name}: {one.plan.strategy.name}, peak {peak}{often}")
        lines += [f"not planned: {one}" for one in self.skipped]
        return "\n".join(lines)

    def call(self, one: PlannedGraph, args: Sequence[Any]) -> Any:
        """Run a graph. The first call of a step divides the budget among the graphs that the step
        before has run."""
        if not any(waiting_calls(one.run) for one in self._now):
            self.graphs, self._now = self._now or self.graphs, {}
            if self.graphs != self._divided:
                self._divide(self.graphs, self.graphs)
                self._divided = dict(self.graphs)
        if one.runs is not one.plan:
            # A plan is applied in a call of its kind, with the planned parameters and autocast.
            one.run, one.runs = one.plan.apply(one.module, tuple(args)), one.plan
        self._now[one] = max(self._now.get(one, 0), waiting_calls(one.run) + 1)
        return one.run(*args)

    def skip(self, found: SkippedFrame) -> None:
        """Note a part that is not planned, and warn once.

        Raises:
            CaptureError: with the option `strict`.
        """
        if found in self.skipped:
            return
        if self.options.get("strict"):
            raise CaptureError(found.message)
        # torch's own modules are skipped together with their caller, which was warned about.
        if not (found.of_torch and self.skipped):
            warnings.warn_explicit(found.message, UserWarning, found.path, found.line)
        self.skipped.append(found)

    def planned(self, name: str, module: nn.Module, args: Sequence[Any]) -> PlannedGraph:
        """Plan a graph for a kind of inputs that it was not called with before."""
        own = ("budget", "strict", *_SOLVING)
        how = {k: v for k, v in self.options.items() if k not in own}
        with compiled_code_kept():
            first = plan(module, tuple(args), strategy="store-all", **{"progress": False, **how})
        small = small_plans(first, self._solved(first, MINIMUM))
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        run = first.apply(module, tuple(args))
        made = PlannedGraph(name, module, first, small, storages, first, first, run)
        others = {**self.graphs, **self._now}
        waiting = {one: times for one, times in others.items() if waiting_calls(one.run)}
        self._divide({**waiting, made: 1}, [made])
        return made

    def _solved(self, first: Plan, budget: WrittenBudget) -> Plan:
        how = {name: self.options[name] for name in _SOLVING if name in self.options}
        return plan(first.profiled, budget=budget, progress=False, **how)

    def _divide(self, together: Mapping[PlannedGraph, int], anew: Iterable[PlannedGraph]) -> None:
        """Divide the budget among graphs that run together, and plan some of them again."""
        key = frozenset(together.items())
        if key not in self._known:
            self._known[key] = self._plans(together)
        for one in anew:
            one.plan = self._known[key][one]
        if len(together) > 1:
            _LOG.info("the compiled step has %s", self.report())

    def _plans(self, together: Mapping[PlannedGraph, int]) -> Mapping[PlannedGraph, Plan]:
        """Plan graphs that run together within the budget."""
        written: WrittenBudget = self.options.get("budget")
        if written is None:
            return {one: one.first for one in together}
        if len(together) == 1 and set(together.values()) == {1}:
            return {one: self._solved(one.first, written) for one in together}
        stored = {one: one.first for one in together}
        most = _peak_bytes(together, stored)
        budget = None if written == MINIMUM else parse_budget(written, most)
        made = chosen(
            budget,
            stored,
            by_kind(together, (one.small for one in together)),
            lambda one, share: self._solved(one.first, share),
            lambda plans: _peak_bytes(together, plans),
        )
        smallest = _peak_bytes(together, made)
        if budget is not None and smallest > budget:
            raise InfeasibleBudgetError(
                f"the {len(together)} graphs of the compiled step need {format_bytes(smallest)} "
                f"together, the budget is {format_bytes(budget)}; fewer graph breaks need less",
                budget,
                smallest,
            )
        return made


def _peak_bytes(together: Mapping[PlannedGraph, int], plans: Mapping[PlannedGraph, Plan]) -> int:
    """Return the peak of a step: one graph runs at a time, beside all that the others hold."""
    given: dict[int, int] = {}
    for one in together:
        given |= one.storages
    held = {one: _held_bytes(plans[one]) for one in together}
    others = sum(held[one] * times for one, times in together.items())
    running = (plans[one].peak_bytes - one.first.resident_bytes - held[one] for one in together)
    return sum(given.values()) + others + max(running)


def _held_bytes(made: Plan) -> int:
    """Return the bytes that a graph holds while others run: saved tensors before its backward,
    gradients after it. Its inputs are counted elsewhere, its outputs as inputs of other graphs."""
    graph, program = made.graph, made.program
    boundary = program.boundary
    kept = lifetimes(graph, program).device
    live = {x.tensor for x in kept if boundary is not None and x.is_live_at(boundary)}
    sizes = (
        sum(graph.tensors[t].size_bytes for t in set(tensors) - graph.resident)
        for tensors in (live - set(graph.outputs) - set(graph.tangents), graph.gradients)
    )
    return max(sizes)


_STEPS: dict[int, CompiledStep] = {}
"""Id of the options → step. Each `torch.compile` has its own options; its step keeps them alive."""


def memopt_backend(
    module: torch.fx.GraphModule, example_inputs: Any, *, options: Any = None, **_: Any
) -> Callable[..., Any]:
    """Make the planned callable of a graph, for `torch.compile(model, backend="memopt")`.

    Args:
        module: Dynamo's graph of a part of the model.
        example_inputs: not used: planning waits for the first call.
        options: arguments of `memopt.plan`: budget, strategy, kernels, host_budget, device,
            optimizer, order, place, time_limit_s, cache, progress; and `strict`: raise CaptureError
            if Dynamo runs a part of the model uncompiled, instead of warning.

    Raises:
        ValueError: an unknown option.
    """
    given = options or {}
    unknown = sorted(given.keys() - set(_OPTIONS))
    if unknown:
        known = ", ".join(_OPTIONS)
        raise ValueError(f"backend='memopt' takes the options {known}, got {', '.join(unknown)}")
    step = _step_of(options)
    # Dynamo does not skip a plain GraphModule's forward. It is in training mode, since the graph
    # has the user's mode already.
    own = with_custom_functions(torch.fx.GraphModule(module, module.graph))
    own.training = True
    name, kinds = _begins_at(module), dict[Any, PlannedGraph | None]()

    @function_modes_off()
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled() or not any(map(_trained, args)):
            step.without_gradients += 1
            return own(*args)
        kind = tuple(map(_described, args))
        if kind not in kinds:
            try:
                kinds[kind] = step.planned(name, own, args)
            except NothingToTrainError:
                kinds[kind] = None  # a part between graph breaks without gradients
        planned = kinds[kind]
        if planned is None:
            step.without_gradients += 1
            return own(*args)
        return step.call(planned, args)

    return run


def compiled_steps() -> tuple[CompiledStep, ...]:
    """Return the steps of each `torch.compile(..., backend="memopt")` in this process."""
    return tuple(_STEPS.values())


def _step_of(options: Any) -> CompiledStep:
    """Return the step of a `torch.compile`; without options each graph has a step of its own."""
    step = CompiledStep(options or {})
    return step if options is None else _STEPS.setdefault(id(options), step)


def _hear(backend: Any, found: SkippedFrame) -> None:
    """Note a skipped function if its backend is memopt's."""
    if getattr(backend, "compiler_fn", backend) is memopt_backend:
        _step_of(getattr(backend, "kwargs", {}).get("options")).skip(found)


hear_skipped_frames(_hear)


def _trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        kind = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        return (*kind, *autocast_state())
    return value


def _begins_at(module: torch.fx.GraphModule) -> str:
    """Say where in the user's code a graph begins: "file.py:12, in forward"."""
    for node in module.graph.nodes:
        trace = node.meta.get("stack_trace") or ""
        places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        if node.op != "placeholder" and places:
            return places[-1].removeprefix("File ").replace('"', "").replace(", line ", ":", 1)
    return "the start"
