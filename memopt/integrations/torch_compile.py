"""`torch.compile(model, backend="memopt", options={"budget": "8GiB", "strategy": "auto"})`.

Dynamo hands over a graph for every stretch of the model without a break. Each is planned when it is
first called with a kind of inputs, of which it has the shapes then: a call of another shape is
planned anew, and kernels that are known need not be measured again. Calls without gradients run as
they are.

The budget is for the whole step. Where a step has several graphs, all that they are called with is
charged once; while one runs, the others hold what they keep for their backwards, or their
gradients. Each gets its smallest plan and the same part of what lies between that and its
store-all, the largest with which the step is within the budget. The graphs of a step are known when
it ran once: in that one the first graphs may take the part of those that are to come.

What Dynamo runs as it is never becomes a graph. Such parts are warned about, or refused with
`options={"strict": True}`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.api.plan import Plan
from memopt.api.planning import plan
from memopt.errors import CaptureError, InfeasibleBudgetError, NothingToTrainError
from memopt.executor.in_compiled_code import compiled_code_kept
from memopt.integrations.custom_functions import with_custom_functions
from memopt.integrations.skipped_frames import SkippedFrame, hear_skipped_frames
from memopt.models.budget import MINIMUM, WrittenBudget, format_bytes, parse_budget
from memopt.programs.lifetimes import lifetimes
from memopt.step.backend import autocast_state
from memopt.torch_private.modes import function_modes_off

_LOG = logging.getLogger(__name__)
_SOLVING = ("strategy", "host_budget", "device", "order", "place", "time_limit_s")
_PARTS = 16
_OPTIONS = ("budget", *_SOLVING, "kernels", "optimizer", "cache", "progress", "strict")


@dataclass(eq=False)
class PlannedGraph:
    """One graph of a compiled model, for one kind of inputs.

    Attributes:
        name: where the graph begins in the user's code.
        module: the graph.
        first: its store-all.
        floor: its plan of the smallest peak.
        storages: bytes of every storage that it is called with.
        plan: the plan that it is to run.
        run: the graph under `runs`, its plan when it was last called.
    """

    name: str
    module: nn.Module
    first: Plan
    floor: Plan
    storages: dict[int, int]
    plan: Plan
    runs: Plan
    run: nn.Module


@dataclass(eq=False)
class CompiledStep:
    """The graphs of one `torch.compile(..., backend="memopt")`.

    Attributes:
        options: as given to `torch.compile`.
        graphs: those of the last whole step, each with the most calls of it that were waiting for
            their backwards at once.
        skipped: what Dynamo runs as it is, without a plan.
        without_gradients: calls of graphs that ran as they are, with nothing to train in them.
    """

    options: Mapping[str, Any]
    graphs: dict[PlannedGraph, int] = field(default_factory=dict)
    skipped: list[SkippedFrame] = field(default_factory=list)
    without_gradients: int = 0
    _now: dict[PlannedGraph, int] = field(default_factory=dict)
    _divided: dict[PlannedGraph, int] = field(default_factory=dict)
    _known: dict[frozenset[tuple[PlannedGraph, int]], dict[PlannedGraph, Plan]] = field(
        default_factory=dict
    )

    def report(self) -> str:
        """A line for each graph of the last step: where it begins, and its plan; and one for each
        part that Dynamo runs without a plan."""
        count = len(self.graphs)
        lines = [f"{count} graph{'s' * (count != 1)}, {max(0, count - 1)} breaks between them"]
        for number, (one, times) in enumerate(self.graphs.items(), 1):
            peak = format_bytes(one.plan.peak_bytes)
            often = f", {times} at a time" if times > 1 else ""
            lines.append(f"{number}. from {one.name}: {one.plan.strategy.name}, peak {peak}{often}")
        lines += [f"not planned: {one}" for one in self.skipped]
        return "\n".join(lines)

    def call(self, one: PlannedGraph, args: Sequence[Any]) -> Any:
        """Run a graph. Where a step begins, what is known of the one before divides the budget."""
        if not any(map(_waiting, self._now)):
            self.graphs, self._now = self._now or self.graphs, {}
            if self.graphs != self._divided:
                self._divide(self.graphs, self.graphs)
                self._divided = dict(self.graphs)
        if one.runs is not one.plan:
            # Only in a call of its kind the parameters and autocast are as they were planned.
            one.run, one.runs = one.plan.apply(one.module, tuple(args)), one.plan
        self._now[one] = max(self._now.get(one, 0), _waiting(one) + 1)
        return one.run(*args)

    def skip(self, found: SkippedFrame) -> None:
        """Note what is not planned, and warn once.

        Raises:
            CaptureError: with the option `strict`.
        """
        if found in self.skipped:
            return
        if self.options.get("strict"):
            raise CaptureError(found.message)
        # Modules of torch itself are skipped where the function that calls them is.
        if not (found.of_torch and self.skipped):
            warnings.warn_explicit(found.message, UserWarning, found.path, found.line)
        self.skipped.append(found)

    def planned(self, name: str, module: nn.Module, args: Sequence[Any]) -> PlannedGraph:
        """Plan a graph for a kind of inputs that it was not called with before."""
        own = ("budget", "strict", *_SOLVING)
        how = {k: v for k, v in self.options.items() if k not in own}
        with compiled_code_kept():
            first = plan(module, tuple(args), strategy="store-all", **{"progress": False, **how})
        floor = self._solved(first, MINIMUM)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        run = first.apply(module, tuple(args))
        made = PlannedGraph(name, module, first, floor, storages, first, first, run)
        others = {**self.graphs, **self._now}
        waiting = {one: times for one, times in others.items() if _waiting(one)}
        self._divide({**waiting, made: 1}, [made])
        return made

    def _solved(self, first: Plan, budget: WrittenBudget) -> Plan:
        how = {name: self.options[name] for name in _SOLVING if name in self.options}
        return plan(first.profiled, budget=budget, progress=False, **how)

    def _divide(self, together: Mapping[PlannedGraph, int], anew: Iterable[PlannedGraph]) -> None:
        """Plan some graphs anew within the budget for all of them."""
        key = frozenset(together.items())
        if key not in self._known:
            self._known[key] = self._plans(together)
        for one in anew:
            one.plan = self._known[key][one]
        if len(together) > 1:
            _LOG.info("the compiled step has %s", self.report())

    def _plans(self, together: Mapping[PlannedGraph, int]) -> dict[PlannedGraph, Plan]:
        """The plan of each graph: the largest share of what lies between smallest plans and
        store-all with which the step is within the budget, to a sixteenth."""
        written: WrittenBudget = self.options.get("budget")
        if written is None:
            return {one: one.first for one in together}
        if len(together) == 1 and set(together.values()) == {1}:
            return {one: self._solved(one.first, written) for one in together}
        floors = {one: one.floor for one in together}
        stored = {one: one.first for one in together}
        most = _peak_bytes(together, stored)
        budget = None if written == MINIMUM else parse_budget(written, most)
        smallest = _peak_bytes(together, floors)
        if budget is None:
            return floors
        if budget >= most:
            return stored
        if budget < smallest:
            raise InfeasibleBudgetError(
                f"the {len(together)} graphs of the compiled step need {format_bytes(smallest)} "
                f"together, the budget is {format_bytes(budget)}; fewer graph breaks need less",
                budget,
                smallest,
            )
        best = floors
        low, high = 0, _PARTS
        while high - low > 1:
            middle = (low + high) // 2
            made = {one: self._solved(one.first, _between(one, middle)) for one in together}
            fits = _peak_bytes(together, made) <= budget
            best = made if fits else best
            low, high = (middle, high) if fits else (low, middle)
        return best


def _between(one: PlannedGraph, part: int) -> int:
    least = one.floor.peak_bytes
    return least + (one.first.peak_bytes - least) * part // _PARTS


def _peak_bytes(together: Mapping[PlannedGraph, int], plans: Mapping[PlannedGraph, Plan]) -> int:
    """The peak of a step: one graph runs at a time, and the others hold what they must."""
    given: dict[int, int] = {}
    for one in together:
        given |= one.storages
    held = {one: _held_bytes(plans[one]) for one in together}
    others = sum(held[one] * times for one, times in together.items())
    running = (plans[one].peak_bytes - one.first.resident_bytes - held[one] for one in together)
    return sum(given.values()) + others + max(running)


def _held_bytes(made: Plan) -> int:
    """What a graph holds while others run, above what it is called with: what it keeps for its
    backward, or the gradients after it. Its outputs are what another graph is called with."""
    graph, program = made.graph, made.program
    boundary = program.boundary
    kept = lifetimes(graph, program).device
    live = {x.tensor for x in kept if boundary is not None and x.is_live_at(boundary)}
    sizes = (
        sum(graph.tensors[t].size_bytes for t in set(tensors) - graph.resident)
        for tensors in (live - set(graph.outputs) - set(graph.tangents), graph.gradients)
    )
    return max(sizes)


def _waiting(one: PlannedGraph) -> int:
    """Calls of a graph whose backwards have not run yet."""
    return len(one.run.__dict__["_memopt"][2])


_STEPS: dict[int, CompiledStep] = {}
"""By the options' object, which is one for each `torch.compile`, and which its step keeps."""


def memopt_backend(
    module: torch.fx.GraphModule, example_inputs: Any, *, options: Any = None, **_: Any
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="memopt", options={...})`.

    Args:
        module: a graph of the model, by dynamo.
        example_inputs: what it will be called with; not used, planning waits for the first call.
        options: arguments of `memopt.plan`: budget, strategy, kernels, host_budget, device,
            optimizer, order, place, time_limit_s, cache, progress; and `strict`: raise CaptureError
            where Dynamo runs a part of the model as it is, instead of warning.

    Raises:
        ValueError: another option.
    """
    given = options or {}
    unknown = sorted(given.keys() - set(_OPTIONS))
    if unknown:
        known = ", ".join(_OPTIONS)
        raise ValueError(f"backend='memopt' takes the options {known}, got {', '.join(unknown)}")
    step = _step_of(options)
    # A plain one, whose forward dynamo does not skip; in training mode, since what the mode decides
    # is in the graph.
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
                kinds[kind] = None  # a part between graph breaks that only looks at values
        planned = kinds[kind]
        if planned is None:
            step.without_gradients += 1
            return own(*args)
        return step.call(planned, args)

    return run


def compiled_steps() -> tuple[CompiledStep, ...]:
    """What `torch.compile(..., backend="memopt")` has planned in this process, and what not."""
    return tuple(_STEPS.values())


def _step_of(options: Any) -> CompiledStep:
    """The step of a `torch.compile`; one of its own for every graph without options."""
    step = CompiledStep(options or {})
    return step if options is None else _STEPS.setdefault(id(options), step)


def _hear(backend: Any, found: SkippedFrame) -> None:
    """Dynamo runs something as it is, for whichever backend."""
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
    """Where in the user's code a graph begins: "file.py:12, in forward"."""
    for node in module.graph.nodes:
        trace = node.meta.get("stack_trace") or ""
        places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        if node.op != "placeholder" and places:
            return places[-1].removeprefix("File ").replace('"', "").replace(", line ", ":", 1)
    return "the start"
