"""memopt's choice of what is saved and what is recomputed, inside Inductor's own pipeline.

`torch.compile` traces forward and backward together, and a partitioner divides this joint graph: it
chooses what the forward saves and what the backward recomputes. Here a plan of the joint graph
chooses. Its costs are those of Inductor's kernels, fused between matrix products, convolutions and
attentions. Inductor compiles both halves with all its features (CUDA graphs, max-autotune).

A plan's peak cannot be exact here: Inductor fuses, orders and allocates in its own way, and
recomputes each value at most once. `Partitioner.compile` measures a real step, and plans again
within a smaller budget until the step keeps the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from memopt.api.solving import planned_device, solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.integrations.partition_graph import (
    NAME,
    captured_joint,
    forward_nodes,
    is_view,
    kept_at_loss,
    kept_by,
    made_again_once,
    moves_tensors,
    saved_tensors,
)
from memopt.integrations.partition_search import PartitionReport, RealStep
from memopt.kernels.compiled.fuse import planned_regions
from memopt.models.budget import MINIMUM, WrittenBudget, format_bytes, parse_budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.plan_record import PlanRecord
from memopt.pricing.device_measure import measure_device
from memopt.pricing.measure import with_costs
from memopt.pricing.roofline import estimate_costs
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.chain_view import ChainView
from memopt.step.build import Lowering, build
from memopt.step.inputs import to_call
from memopt.step.loss import Loss
from memopt.step.nodes import is_random
from memopt.strategies import Strategy, resolve
from memopt.strategies.target import chain_view
from memopt.torch_private.aot import functorch_set
from memopt.torch_private.inductor import CustomPartitionerFn, divided_by_torch

_ROUNDS = 6
_TORCHS = tuple(round(1 - part / 10, 1) for part in range(1, 11))
_TAKEN = 2
"""The `activation_memory_budget`s that are tried, and how many fitting ones are timed at most."""
_STEPS = 16
"""A strategy solves at budgets in so many equal steps from its smallest peak to store-all's, since
a plan that recomputes values several times may need more when they are recomputed once."""


@dataclass(frozen=True)
class _SavedChoice:
    """A compiled choice of saved tensors, and the peak of a real step."""

    one: Partitioner
    run: Any
    peak_bytes: int


class Partitioner(CustomPartitionerFn):
    """A partitioner for `torch.compile(options={"custom_partitioner_fn": ...})`; see
    `memopt.partitioner`.

    Attributes:
        report: of the last `compile`; None before it.
    """

    def __init__(
        self,
        budget: WrittenBudget,
        strategy: str | Strategy = "rotor",
        device: Any = None,
        torch_budget: float | None = None,
    ) -> None:
        self.budget = budget
        self.strategy = resolve(strategy)
        features = self.strategy.features
        if features.offload and not features.recompute:
            raise moves_tensors(self.strategy.name)
        self.device = _device(device)
        self.torch_budget = torch_budget
        """The `activation_memory_budget` within which torch chooses; None: a plan chooses."""
        self.report: PartitionReport | None = None
        self.predicted_peak_bytes = 0
        self.saved = self.recomputed = 0
        self._kept: frozenset[int] = frozenset()
        self.failure: MemoptError | None = None

    def uuid(self) -> str:
        """Return the key in Inductor's caches, which names strategy, budget and device."""
        text = f"{self.budget!r} {self.strategy!r} {self.device!r}"
        if self.torch_budget is not None:
            text = self.whose
        return f"memopt {hashlib.sha256(text.encode()).hexdigest()[:24]}"

    @property
    def whose(self) -> str:
        """Return who chooses the saved tensors."""
        if self.torch_budget is None:
            return "memopt"
        return f"torch, activation_memory_budget={self.torch_budget}"

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Divide a joint graph; called by Inductor."""
        outputs = int(kwargs["num_fwd_outputs"])
        forward = {node.name for node in forward_nodes(gm) if not is_view(node)}
        torchs = self.torch_budget is not None
        try:
            lowering, graph = self._read(gm, outputs)
            if not torchs:
                self._plan(graph)
                if self.budget is not None:
                    self._tag(gm, lowering)
        except MemoptError as error:
            self.failure = error
            raise
        budgets = {"activation_memory_budget": self.torch_budget} if torchs else {}
        with functorch_set(**budgets):
            halves: tuple[GraphModule, GraphModule] = divided_by_torch()(gm, joint_inputs, **kwargs)
        self.recomputed = sum(node.name in forward for node in halves[1].graph.nodes)
        if torchs:
            results: Any = halves[0].graph.output_node().args[0]
            kept = saved_tensors(lowering, {node.name for node in results[outputs:]})
            self.saved = len(kept)
            self.predicted_peak_bytes = replay(graph, made_again_once(graph, kept)).peak_bytes
        return halves

    def _read(self, gm: GraphModule, outputs: int) -> tuple[Lowering, Graph]:
        """Return the joint graph, with the costs of the regions that Inductor fuses."""
        captured = captured_joint(gm, outputs)
        model, blocks = nn.Module(), self.device.block_bytes
        lowering = build(model, captured, blocks)
        made, regions = planned_regions(model, captured, lowering, "compiled", blocks)
        return made.lowering, with_costs(
            made.lowering, estimate_costs(made.lowering, self.device, regions)
        )

    def _plan(self, graph: Graph) -> None:
        """Choose the saved tensors of the fastest step within the budget, among plans of the
        strategy at several budgets."""
        whole = store_all(graph)
        base = replay(graph, whole)
        limit = None if self.budget is None else parse_budget(self.budget, base.peak_bytes)
        if limit is None or base.peak_bytes <= limit:
            self.predicted_peak_bytes, self._kept = base.peak_bytes, kept_at_loss(graph, whole)
            return
        view = chain_view(graph)  # made once for all solves
        least = solve(graph, MINIMUM, self.strategy, device=self.device, view=view)
        room = base.peak_bytes - least.peak_bytes
        tries = [least.peak_bytes + room * part // _STEPS for part in range(1, _STEPS)]
        best: tuple[float, int, frozenset[int]] | None = None
        smallest = base.peak_bytes
        for plan in (least, *self._plans(view, tries)):
            kept = kept_by(plan)
            once = made_again_once(graph, kept)
            figures = replay(graph, once)
            smallest = min(smallest, figures.peak_bytes)
            if figures.peak_bytes <= limit and (best is None or figures.time_s < best[0]):
                best = figures.time_s, figures.peak_bytes, kept
        if best is None:
            raise InfeasibleBudgetError(
                f"{self.strategy.name} finds no choice of saved values with which Inductor's step, "
                f"which recomputes each value at most once, keeps to {format_bytes(limit)}: the "
                f"smallest peak found is {format_bytes(smallest)}. Raise the budget",
                limit,
                smallest,
            )
        _, self.predicted_peak_bytes, self._kept = best

    def _plans(self, view: ChainView, budgets: Sequence[int]) -> Iterator[PlanRecord]:
        for budget in budgets:
            with contextlib.suppress(InfeasibleBudgetError):
                yield solve(view.graph, budget, self.strategy, device=self.device, view=view)

    def _tag(self, gm: GraphModule, lowering: Lowering) -> None:
        """Tag nodes for torch's partitioner: which it must save; it may recompute all others."""
        kept = self._kept & set(lowering.graph.producer)
        names = {lowering.bases[t].meta.get(NAME) for t in kept if t in lowering.bases}
        self.saved = 0
        for node in forward_nodes(gm):
            results = [node, *(user for user in node.users if user.target is operator.getitem)]
            saved = any(one.name in names for one in results)
            self.saved += saved
            keeps = saved or is_random(node)
            policy = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta |= {"recompute": policy, "ac_graph_id": 0}

    def compile(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        targets: Any = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Compile a model so that a measured step keeps the budget.

        Args:
            model: the module, in training mode, where it will run.
            inputs: an example call: a tensor, a tuple, or a dict of keyword arguments.
            loss_fn, targets: the loss of the measured step; None: backward from the outputs.
            options: further ones of `torch.compile`.

        Returns:
            The compiled module; `report` says what was predicted and measured.

        Raises:
            InfeasibleBudgetError: no measured step kept the budget.
            MemoptError: the graph or the strategy cannot be used.
        """
        loss = None if loss_fn is None else Loss(loss_fn, targets)
        step = RealStep(model, to_call(inputs), loss)
        one = Partitioner(None, self.strategy, self.device, 1.0)
        first = _measured(step, one, _compiled(model, one, options))
        budget = parse_budget(self.budget, first.peak_bytes)
        if budget is None:
            raise ValueError('name a budget: bytes, a share, or a string with a unit ("6GiB")')
        if first.peak_bytes <= budget:
            self._tell(first, budget, 1)
            return first.run
        own, rounds, failure = self._planned(step, budget, options)
        others, tried = self._torchs_choices(step, budget, options)
        kept = [*own, *others]
        if not kept:
            assert failure is not None
            raise failure
        times = step.times_s([choice.run for choice in kept]) if len(kept) > 1 else [0.0]
        for _, choice in sorted(zip(times, kept, strict=True), key=lambda timed: timed[0]):
            best = _measured(step, choice.one, _compiled(model, choice.one, options))
            if best.peak_bytes <= budget:
                self._tell(best, budget, 1 + rounds + tried)
                return best.run
        raise InfeasibleBudgetError(
            f"the chosen step took {format_bytes(best.peak_bytes)} when it was compiled once more; "
            f"the budget is {format_bytes(budget)}. Raise it",
            budget,
            best.peak_bytes,
        )

    def _planned(
        self, step: RealStep, budget: int, options: dict[str, Any] | None
    ) -> tuple[list[_SavedChoice], int, InfeasibleBudgetError | None]:
        """Plan within smaller and smaller budgets until a measured step keeps this one. Return that
        choice, if any; the number of measured plans; and the error if there is none."""
        within, rounds, peak = budget, 0, 0
        try:
            for rounds in range(1, _ROUNDS + 1):
                one = Partitioner(within, self.strategy, self.device)
                choice = _measured(step, one, _trial(step.model, one, options))
                peak = choice.peak_bytes
                if peak <= budget:
                    return [choice], rounds, None
                within = one.predicted_peak_bytes - max(1, peak - budget)
        except InfeasibleBudgetError as error:
            return [], rounds, error
        text = (
            f"{rounds} plans were measured, the last took {format_bytes(peak)}; the budget is "
            f"{format_bytes(budget)}"
        )
        return [], rounds, InfeasibleBudgetError(text, budget, peak)

    def _torchs_choices(
        self, step: RealStep, budget: int, options: dict[str, Any] | None
    ) -> tuple[list[_SavedChoice], int]:
        """Measure torch's choices, from the largest `activation_memory_budget` down, until two keep
        this budget (peaks do not fall steadily). Return these, and how many were measured."""
        found: list[_SavedChoice] = []
        tried = 0
        for share in _TORCHS:
            if len(found) < _TAKEN:
                one = Partitioner(None, self.strategy, self.device, share)
                choice = _measured(step, one, _trial(step.model, one, options))
                found += [choice] if choice.peak_bytes <= budget else []
                tried += 1
        return found, tried

    def _tell(self, choice: _SavedChoice, budget: int, rounds: int) -> None:
        one = choice.one
        within = parse_budget(one.budget, budget)
        self.report = PartitionReport(
            budget_bytes=budget,
            planned_within_bytes=budget if within is None else within,
            predicted_peak_bytes=one.predicted_peak_bytes,
            measured_peak_bytes=choice.peak_bytes,
            saved=one.saved,
            recomputed=one.recomputed,
            rounds=rounds,
            chosen=one.whose,
        )


def _device(device: Any) -> Device:
    if isinstance(device, Device):
        return device
    if device is not None:
        return planned_device(device, "estimate")
    return measure_device()


def _measured(step: RealStep, one: Partitioner, run: Any) -> _SavedChoice:
    """Measure the peak of a compiled choice."""
    try:
        return _SavedChoice(one, run, step.peak_bytes(run))
    except Exception:
        if one.failure is not None:
            raise one.failure from None
        raise


def _trial(model: nn.Module, one: Partitioner, options: dict[str, Any] | None) -> Any:
    """Compile the model's call as a new function: Dynamo limits how often it compiles one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace()
    own = types.FunctionType(code, call.__globals__, "call", None, call.__closure__)
    return _compiled(own, one, options)


def _compiled(model: Callable[..., Any], one: Partitioner, options: dict[str, Any] | None) -> Any:
    more = {**(options or {}), "custom_partitioner_fn": one}
    return torch.compile(model, fullgraph=True, dynamic=False, options=more)
