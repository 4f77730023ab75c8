"""The stages between a model and its plan. "Again" is a stage's work on a step captured again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memopt.errors import PlanFileError, RankError
from memopt.models.agreed_graph import agreed_graph
from memopt.models.budget import MINIMUM, parse_budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.options import Pricing, StepOptions, parse_returns
from memopt.models.progress import Progress
from memopt.models.same_graph import resized
from memopt.models.stage_record import EXACT, options_of
from memopt.models.warned import warn
from memopt.stages.base import PlanStage, Preparation, Recapture

if TYPE_CHECKING:
    from typing import Any

    from memopt.step.profiled import Profiled

PROFILING = "the step is profiled"
STEADY_STATE = "steady state"


def profiled_for(
    model: Any,
    inputs: Any,
    step: StepOptions,
    pricing: Pricing,
    device: Device,
    report: Progress,
    *,
    whole_step: bool = False,
) -> Profiled | None:
    """Capture and price a module's step; None for a cost model, which has prices already.

    Raises:
        ValueError: `model` is neither of these, or arguments cannot be combined.
    """
    if isinstance(model, (Chain, Graph)):
        module_only = (inputs, step.loss_fn, step.optimizer)
        if any(value is not None for value in module_only):
            raise ValueError("inputs, loss_fn and optimizer go with a module, not a cost model")
        return None
    from memopt.profiler import profiled_of

    return profiled_of(
        model,
        inputs,
        loss_fn=step.loss_fn,
        targets=step.targets,
        optimizer=step.optimizer,
        estimate_for=device if pricing.mode == "estimate" else None,
        cache=pricing.cache,
        whole_step=whole_step,
        offload_optimizer=whole_step and step.offload_optimizer,
        loss_alone=parse_returns(step.returns) == "loss",
        kernels=pricing.kernels,
        rules=step.rules,
        progress=report,
    )


class Capture(PlanStage):
    """Captures the step, chooses its kernels and prices it. Again: with the plan's kernels, and
    without prices."""

    name = "capture"

    def apply(self, step: Preparation) -> Preparation:
        profiled = profiled_for(
            step.model,
            step.inputs,
            step.step,
            step.pricing,
            step.device,
            step.report,
            whole_step=step.whole_step,
        )
        if profiled is None or options_of(profiled.stages, self.name) is not None:
            return replace(step, profiled=profiled)
        how = "measured" if profiled.baseline.measured else "estimated"
        kernels = "aten" if profiled.record is None else profiled.record.kernels
        return step.made(profiled, self.name, how, kernels)

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        from memopt.stages.capturing import captured_module, captured_whole_step

        make = captured_module if step.optimizer is None else captured_whole_step
        return replace(step, found=make(step))


class Accumulate(PlanStage):
    """Charges gradients that exist when a step begins."""

    name = "accumulate"

    def why_not(self, step: Preparation) -> str | None:
        return None if step.step.accumulate else "gradients are not accumulated"

    def apply(self, step: Preparation) -> Preparation:
        from memopt.profiler.accumulation import accumulating

        made = accumulating(step.profiled, whole_step=step.whole_step)
        return step.made(made, self.name)


class Charge(PlanStage):
    """Charges the memory that the training loop of a wrapped model needs beside its steps."""

    name = "charge"

    def why_not(self, step: Preparation) -> str | None:
        return None if step.charges else "nothing was met beside the step"

    def apply(self, step: Preparation) -> Preparation:
        from memopt.profiler.accumulation import charged

        return step.made(charged(step.profiled, step.charges), self.name)


class Movable(PlanStage):
    """Lets parameters, gradients and optimizer state of a whole step move. Again: as planned."""

    name = "movable"

    def why_not(self, step: Preparation) -> str | None:
        return None if step.step.movable else "nothing may live on the host between steps"

    def apply(self, step: Preparation) -> Preparation:
        from memopt.step.movable import parse_movable, with_movable

        kinds, repeated = step.step.movable, step.step.steady_state
        made = with_movable(step.profiled, step.step.optimizer, kinds, repeated=repeated)
        options = (*sorted(parse_movable(kinds)), *((STEADY_STATE,) if repeated else ()))
        return step.made(made, self.name, *options)

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        from memopt.step.movable import movable_as_planned

        parts = step.made.parts
        if parts is None:
            return step
        assert step.optimizer is not None
        lowering = movable_as_planned(
            parts, step.made.lowering, step.plan.graph, step.optimizer, step.block_bytes
        )
        return step.lowered(lowering)


class Recognise(PlanStage):
    """Again: compares the captured graph with the planned one."""

    name = "recognise"

    def why_not(self, step: Preparation) -> str | None:
        return "what is captured is what is planned"

    def apply(self, step: Preparation) -> Preparation:
        return step

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        import torch

        from memopt.stages.capturing import difference_of_graphs

        record, here = step.plan.record, str(torch.__version__)
        there = here if record is None else record.torch_version
        other = "" if there in ("", here) else f"planned with torch {there}, this is {here}"
        where = difference_of_graphs(step)
        if step.optimizer is not None and where is not None:
            reason = (
                "the captured steps differ (another loss, trained parameters or their order; "
                f"planned with torch {there}, this is {here}){where}"
            )
            raise PlanFileError(
                f"this plan is for another step: {reason.replace('model.', '')}. "
                + step.plan_again()
            )
        if where is not None:
            same = "the captured graphs differ although shapes and parameters are the same"
            reason = step.changed or same + where
            reason += f" ({other})" if other else ""
            raise PlanFileError(
                f"this plan was made for another model: {reason}. {step.plan_again()}"
            )
        if other and step.optimizer is None:
            warn(
                f"{other}: the model's graph is the same, so the plan runs, but what was predicted "
                f"may not hold. {step.plan_again()}",
            )
        return step


class UpdatesOnHost(PlanStage):
    """Lets the host run the updates of tensors that may live there. Again: as planned."""

    name = "host updates"

    def why_not(self, step: Preparation) -> str | None:
        if step.step.movable and step.strategy.features.host_updates:
            return None
        return f"{step.strategy.name} runs no updates on the host"

    def apply(self, step: Preparation) -> Preparation:
        from memopt.step.movable import with_host_updates

        made = with_host_updates(step.profiled, step.step.optimizer, step.device)
        return step.made(made, self.name)

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        from memopt.step.host_updates import as_planned, lowered

        if step.made.parts is None:
            return step
        return step.lowered(lowered(step.made.lowering, as_planned(step.plan.graph)))


class Alternatives(PlanStage):
    """Attaches alternative implementations of operators, for strategies that choose among them."""

    name = "alternatives"

    def why_not(self, step: Preparation) -> str | None:
        strategy, profiled = step.strategy, step.profiled
        chooses = strategy.features.implementations
        if profiled is None:
            return "a cost model has its alternatives"
        if not chooses or strategy.only_exact_implementations() is None:
            return f"{strategy.name} chooses no implementations"
        if profiled.lowering.alternatives:
            return "the profile has some already"
        if not strategy.wants_implementations(profiled.graph.compute_time_s):
            return f"{strategy.name} does not search so short a step"
        if step.pricing.mode != "estimate" and not profiled.baseline.measured:
            return "the profile is an estimate, for a device that is not known here"
        return None

    def apply(self, step: Preparation) -> Preparation:
        from memopt.kernels import with_implementations
        from memopt.profiler import MeasureOptions, ProfileCache

        assert step.profiled is not None
        made = with_implementations(
            step.profiled,
            exact_only=bool(step.strategy.only_exact_implementations()),
            device=step.device if step.pricing.mode == "estimate" else None,
            options=MeasureOptions(cache=ProfileCache() if step.pricing.cache else None),
        )
        return replace(step, profiled=made)

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        from memopt.kernels import attach

        plan, lowering = step.plan, step.made.lowering
        on_host = lowering.alternatives.keys()
        chosen = {
            (run.op, run.implementation)
            for _, run in plan.program.computes
            if run.implementation is not None
        }
        chosen -= on_host
        if not chosen:
            return step
        if options is None:
            raise PlanFileError(
                "this plan chooses implementations, and its file does not say from which: "
                f"{step.plan_again()}"
            )
        extended = attach(lowering, exact_only=EXACT in options, block_bytes=step.block_bytes)
        same = [t.name for t in extended.graph.tensors] == [t.name for t in plan.graph.tensors]
        if not same or not chosen <= extended.alternatives.keys():
            raise PlanFileError(
                "this plan chooses implementations that memopt does not have here (your own "
                "families?): apply it in the process and to the model it was made for. "
                + step.plan_again()
            )
        return step.lowered(extended)


class PlannedFigures(PlanStage):
    """Again: gives the captured step the planned step's costs."""

    name = "figures"

    def why_not(self, step: Preparation) -> str | None:
        return "what is captured is priced"

    def apply(self, step: Preparation) -> Preparation:
        return step

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        from memopt.stages.figures import with_planned_figures

        return with_planned_figures(step)


class Placeable(PlanStage):
    """Finds the tensors that a placement must leave to the allocator."""

    name = "placeable"

    def why_not(self, step: Preparation) -> str | None:
        if step.profiled is None:
            return "a cost model says so itself"
        asked = step.place or step.strategy.features.place
        return None if asked else "nothing gets an address"

    def apply(self, step: Preparation) -> Preparation:
        from memopt.executor.out_variants import for_placing

        assert step.profiled is not None
        return step.made(for_placing(step.profiled), self.name)

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        from memopt.executor.out_variants import allocator_owned

        if step.plan.program.offsets is None:
            return step
        lowering = step.made.lowering
        graph = replace(lowering.graph, allocator_owned=allocator_owned(lowering))
        return step.lowered(replace(lowering, graph=graph))


class Agree(PlanStage):
    """Takes the figures of the slowest and largest ranks, and the smallest of the budgets."""

    name = "agree"

    def why_not(self, step: Preparation) -> str | None:
        alone = step.ranks is None or step.profiled is None
        return "this process plans alone" if alone else None

    def apply(self, step: Preparation) -> Preparation:
        ranks, profiled, budget = step.ranks, step.profiled, step.budget
        assert ranks is not None
        assert profiled is not None
        if budget is not None and budget != MINIMUM:
            budget = parse_budget(budget, profiled.baseline.peak_bytes)
        own = (profiled.graph, profiled.baseline, budget)
        graphs, baselines, budgets = zip(*ranks.exchanged(own, PROFILING), strict=True)
        try:
            graph = agreed_graph(graphs)
        except ValueError as error:
            raise RankError(str(error)) from error
        slowest = max(baselines, key=lambda one: one.step_time_s)
        largest_bytes = max(one.peak_bytes for one in baselines)
        record = profiled.record
        if record is not None:
            record = replace(record, resized=resized(profiled.lowering.graph, graph))
        baseline = replace(slowest, peak_bytes=largest_bytes)
        agreed = replace(profiled, graph=graph, baseline=baseline, record=record)
        limits = [one for one in budgets if isinstance(one, int)]
        step = step.made(agreed, self.name, f"{len(ranks.members)} ranks")
        return replace(step, budget=min(limits) if limits else budget)


STAGES: tuple[PlanStage, ...] = (
    Capture(),
    Accumulate(),
    Charge(),
    Movable(),
    Recognise(),
    UpdatesOnHost(),
    Alternatives(),
    PlannedFigures(),
    Placeable(),
    Agree(),
)
"""All stages, in the order in which they run."""
