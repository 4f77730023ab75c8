"""plan(), profile() and strategies(), the user's entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from memopt.api.cluster import on_mesh, with_cluster
from memopt.api.deferred import deferred
from memopt.api.plan import Plan
from memopt.api.ranks import telling_ranks
from memopt.api.request import PlanRequest
from memopt.api.solving import make_plan, planned_device, reporting_on
from memopt.api.solving import solve as solve_record
from memopt.models.budget import WrittenBudget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.mesh import Mesh
from memopt.models.options import (
    Mode,
    PassOptions,
    PlanLimits,
    Pricing,
    Returns,
    StepOptions,
    parse_returns,
)
from memopt.models.progress import Progress
from memopt.models.step_rules import StepRules, scales
from memopt.stages import profiled_for
from memopt.strategies import Strategy


@telling_ranks("a step is planned")
def plan(
    model: Any,
    inputs: Any = None,
    *,
    budget: WrittenBudget = None,
    strategy: str | Strategy = "auto",
    host_budget: int | str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    device: Device | str | None = None,
    mode: Mode = "measure",
    optimizer: Any = None,
    order: bool = False,
    place: bool = False,
    whole_step: bool | None = None,
    offload_optimizer: bool = False,
    movable: str | tuple[str, ...] = (),
    steady_state: bool = False,
    accumulate: bool = False,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    norm_type: float = 2.0,
    scaler: Any = None,
    reduce_once: bool = False,
    returns: Returns = "all",
    time_limit_s: float | None = None,
    kernels: str = "aten",
    mesh: Mesh | None = None,
    cache: bool = True,
    progress: bool | Progress = True,
) -> Plan:
    """Plan a training step within a budget. Ctrl-C ends the solver with its best plan so far.

    Args:
        model: an nn.Module (with `inputs`): capture, profile, solve. Or a Chain, a Graph or a
            profiled model (`memopt.profiler.profile_model`): solve only.
        inputs: example inputs: a tensor, a tuple of positional or a dict of keyword arguments.
            None, for a module: a `DeferredPlan`, which is made at the first training step.
        budget: total device memory of a step: bytes, a share of the baseline peak in (0, 1],
            "6GiB" (2^30) or "6GB" (10^9), "min" (the smallest the strategy can meet), or None: no
            limit, but for an estimate the device's capacity. "6GiB reserved" limits the bytes that
            CUDA's caching allocator reserves instead, fragmentation included, as simulated.
        strategy: a name of `memopt.strategies()`, or an instance with your parameters.
        host_budget: the most bytes that may be on the host at once, for strategies that move data:
            a number or a string such as "6GiB"; None: no limit.
        loss_fn: your loss, `loss_fn(output, *targets)`: its own memory is measured and charged.
        targets: what your loss takes beside the output: a tuple, or the only one.
        device: link rates and capacity: a Device, or a preset's name such as "H100"; None: the
            present machine's.
        mode: "measure" runs the model's kernels here; "estimate" computes nothing and prices
            them for `device` (the model may be on meta).
        optimizer: its state is charged as resident: a torch.optim instance, or a name such as
            "sgd", "adamw", "adamw-fp32", "adamw-8bit".
        order: reorder the strategy's plan for a smaller peak (OLLA's pass).
        place: give the plan's tensors addresses in one arena, if that keeps the budget.
        whole_step: plan the parameters' updates, too, each as early as it can be, for
            `Plan.train_step` instead of `Plan.apply`: needs `loss_fn`, an optimizer instance and
            a strategy for chains, "auto", or one for graphs that recomputes nothing ("olla",
            "store-all", "offload-graph"). None: True for these strategies for graphs, if a
            loss and an optimizer instance are passed, costs are measured, and `accumulate` is off.
        offload_optimizer: keep the optimizer's state on the host; each update brings its
            parameter's state and takes it back. Plans the whole step.
        movable: the tensors of a whole step that may live on the host between their uses:
            "parameters", "gradients", "optimizer", several of them in a tuple, or "all". The plan
            keeps on the device what it has room for. For strategies that move tensors of a graph.
        steady_state: with `movable`, plan a step that is repeated: tensors may stay on the device
            from their update into the next step, whose forward hides their copies to the host.
        accumulate: charge gradients that exist when a step begins: those of earlier micro-batches,
            or zeroed ones that were not set to None.
        micro_batches: of a whole step: how many batches such as `inputs` and `targets` one step
            runs in turn. Gradients are added up, and each loss is divided by this number; call
            `TrainStep.accumulate`. For strategies that recompute nothing.
        clip_norm, norm_type: of a whole step: scale gradients down to this global norm before the
            updates, as `torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm, norm_type)`.
        scaler: of a whole step: the `torch.amp.GradScaler` that scales the losses; a step unscales
            gradients, updates nothing where one is infinite or NaN, and updates the scale.
        reduce_once: of a sharded model's whole step with micro-batches: add up their gradients
            whole, and average them over the ranks once, as FSDP2 after
            `set_requires_gradient_sync(False)`. False: those of each micro-batch.
        returns: "loss": the planned step does not return the outputs that `loss_fn` does not read
            (without `loss_fn`: all but the loss of a model called with `labels`), so that they are
            freed early. Their stand-ins raise NotReturnedError when used. In eval mode and without
            gradients everything is returned.
        time_limit_s: stop the solver after so many seconds with its best plan and bound; each of
            `order` and `place` has as many.
        kernels: the kernels that operators run: "aten", torch's own, as in eager mode; "compiled",
            Inductor's fused ones wherever operators between matrix products, convolutions and
            attentions can be fused (they round otherwise, and draw other random numbers); "auto",
            for each region the faster of both; these two are measured, and need a compiler.
            "tiled", for long sequences: what works token by token runs on some tokens at a time,
            forward and backward, so that nothing between two attentions is kept. Loss and outputs
            are eager's; gradients of parameters are summed chunk by chunk, which rounds otherwise.
        mesh: with mode="estimate", the ranks of a cluster that need not exist; one of them is
            planned. `model` is then a function from a torch DeviceMesh to the model that
            communicates over it (`lambda mesh: memopt.shard(build(), mesh)`), `inputs` one
            rank's. `Plan.stats` has the network's seconds, the hidden share and tokens per second.
        cache: whether measured costs, and plans of modules that took a second to solve, are kept
            on disk (MEMOPT_CACHE_DIR); a plan is read where graph and costs are the same.
        progress: True shows a bar on a terminal; or your own callback.

    Raises:
        InfeasibleBudgetError: no plan fits; names the smallest feasible budget.
        CaptureError: the model cannot be captured.
        ValueError: unreadable budget, unknown strategy, misuse; the message has the remedy.
    """
    step = StepOptions(
        loss_fn=loss_fn,
        targets=targets,
        optimizer=optimizer,
        whole_step=whole_step,
        offload_optimizer=offload_optimizer,
        movable=movable,
        steady_state=steady_state,
        accumulate=accumulate,
        rules=StepRules(micro_batches, clip_norm, norm_type, scales(scaler), reduce_once),
        returns=parse_returns(returns),
    )
    wanted = PlanRequest(
        strategy,
        PlanLimits(budget, host_budget, time_limit_s),
        step,
        Pricing(device, mode, kernels, cache),
        PassOptions(order, place),
        progress=progress,
        keep=cache and inputs is not None,
    )
    if inputs is None and mesh is None and _is_module(model):
        return deferred(model, wanted)
    with _naming_parts(model), on_mesh(model, mesh, mode) as built:
        return Plan.of(with_cluster(make_plan(built, inputs, wanted), mesh, inputs))


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _naming_parts(model: Any) -> AbstractContextManager[None]:
    if not _is_module(model):
        return nullcontext()
    from memopt.executor.part_names import naming_parts

    return naming_parts(model)


def solve(
    cost_model: Chain | Graph,
    budget: WrittenBudget,
    strategy: Strategy,
    **how: Any,
) -> Plan:
    """Solve a cost model once; the arguments are those of `memopt.api.solving.solve`."""
    return Plan.of(solve_record(cost_model, budget, strategy, **how))


def strategies() -> dict[str, str]:
    """Map the names of all strategies to one sentence about each."""
    from memopt.report.texts import first_sentence
    from memopt.strategies import STRATEGIES

    return {s.name: first_sentence(type(s).__doc__ or "") for s in STRATEGIES}


def profile(
    model: Any,
    inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    optimizer: Any = None,
    device: Device | str | None = None,
    mode: Mode = "measure",
    kernels: str = "aten",
    cache: bool = True,
    mesh: Mesh | None = None,
    returns: Returns = "all",
    progress: bool | Progress = True,
) -> Graph:
    """Capture and price a model's training step, measured here or estimated for `device`; the graph
    can be planned, linearized (`graph.to_chain()`) and saved without torch. The arguments are those
    of `plan`."""
    target = planned_device(device, mode)
    step = StepOptions(loss_fn, targets, optimizer, returns=parse_returns(returns))
    pricing = Pricing(device, mode, kernels, cache)
    with reporting_on(progress) as report, on_mesh(model, mesh, mode) as built:
        profiled = profiled_for(built, inputs, step, pricing, target, report)
    if profiled is None:
        raise ValueError("profile takes an nn.Module and its example inputs")
    return profiled.graph
