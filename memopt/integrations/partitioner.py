"""memopt's choice of what is saved and what is recomputed, inside Inductor's own pipeline.

`torch.compile` traces forward and backward together and has a partitioner divide them: what the
forward saves, what the backward makes again. Here a plan of that graph says it, priced as Inductor
runs it: fused kernels between matrix products, convolutions and attentions. Inductor compiles both
halves, with all that it does elsewhere (CUDA graphs, max-autotune).

What a plan says of memory cannot be exact here: Inductor fuses, orders and allocates in its own
way, and makes each value again at most once. `Partitioner.compile` measures a real step, and plans
again within less until the budget is kept.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from memopt.api.planning import planned_device
from memopt.api.solving import solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import WrittenBudget, format_bytes, parse_budget
from memopt.models.device import Device
from memopt.plan_record import PlanRecord
from memopt.profiler.baseline import Loss, backward, clear_gradients
from memopt.profiler.build import Lowering, build
from memopt.profiler.capture import Captured, Hooks, Primal
from memopt.profiler.compiled.fuse import planned_regions
from memopt.profiler.device_measure import measure_device
from memopt.profiler.estimate import estimate_costs
from memopt.profiler.inputs import Call, to_call
from memopt.profiler.measure import with_costs
from memopt.profiler.memory import metered
from memopt.profiler.nodes import is_random
from memopt.profiler.restored_state import state_restored
from memopt.programs.instructions import SwapOut
from memopt.programs.lifetimes import lifetimes
from memopt.strategies import Strategy, resolve

_NAME = "memopt_node"
_ROUNDS = 6


@dataclass(frozen=True)
class PartitionReport:
    """What became of a budget.

    Attributes:
        budget_bytes: as asked for.
        planned_within_bytes: what the last plan was made for.
        predicted_peak_bytes: that plan's; None: nothing was planned, torch's own choice fits.
        measured_peak_bytes: of a real step, with all that is resident.
        saved, recomputed: forward operators whose results are kept, and that run again.
        rounds: steps measured.
    """

    budget_bytes: int
    planned_within_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    saved: int
    recomputed: int
    rounds: int

    def __str__(self) -> str:
        predicted = "-" if self.predicted_peak_bytes is None else self.predicted_peak_bytes
        return (
            f"budget {format_bytes(self.budget_bytes)}, measured peak "
            f"{format_bytes(self.measured_peak_bytes)} (predicted "
            f"{predicted if isinstance(predicted, str) else format_bytes(predicted)}) after "
            f"{self.rounds} rounds; {self.saved} values saved, {self.recomputed} operators rerun"
        )


class Partitioner(CustomPartitionerFn):
    """A partitioner for `torch.compile(options={"custom_partitioner_fn": ...})`; see
    `memopt.partitioner`.

    Attributes:
        report: of the last `compile`; None: there was none.
    """

    def __init__(
        self, budget: WrittenBudget, strategy: str | Strategy = "rotor", device: Any = None
    ) -> None:
        self.budget = budget
        self.strategy = resolve(strategy)
        self.device = _device(device)
        self.report: PartitionReport | None = None
        self.plan: PlanRecord | None = None
        self.saved = self.recomputed = 0
        self.failure: MemoptError | None = None

    def uuid(self) -> str:
        """Names plan and budget in Inductor's caches."""
        text = f"{self.budget!r} {self.strategy!r} {self.device!r}"
        return f"memopt {hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Divide a joint graph; called by Inductor."""
        try:
            self._choose(gm, int(kwargs["num_fwd_outputs"]))
        except MemoptError as error:
            self.failure = error
            raise
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def _choose(self, gm: GraphModule, outputs: int) -> None:
        """Tag the forward's nodes with what the plan does."""
        captured = _captured(gm, outputs)
        model, blocks = nn.Module(), self.device.block_bytes
        lowering = build(model, captured, blocks)
        made, regions = planned_regions(model, captured, lowering, "compiled", blocks)
        lowering = made.lowering
        graph = with_costs(lowering, estimate_costs(lowering, self.device, regions))
        self.plan = plan = solve(graph, self.budget, self.strategy, device=self.device)
        program = plan.program
        if any(isinstance(one, SwapOut) for one in program.instructions):
            raise MemoptError(
                f"strategy {plan.strategy.name!r} moves tensors to the host, which Inductor's own "
                'pipeline does not: name one that recomputes ("rotor", "monet"), or use '
                'torch.compile(backend="memopt")'
            )
        boundary = program.boundary
        kept = {
            life.tensor
            for life in lifetimes(plan.graph, program).device
            if boundary is not None and life.is_live_at(boundary)
        }
        self._tag(gm, lowering, kept, plan)

    def _tag(self, gm: GraphModule, lowering: Lowering, kept: set[int], plan: PlanRecord) -> None:
        again = _recomputed(plan)
        self.recomputed = again
        self.saved = 0
        if not again:
            # Nothing is recomputed: torch's own choice saves least for fused kernels.
            return
        names = {
            lowering.bases[t].meta.get(_NAME)
            for t in kept & set(plan.graph.producer)
            if t in lowering.bases
        }
        for node in _forward_nodes(gm):
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
            loss_fn, targets: the loss of the measured step; None: the outputs' own backward.
            options: more of `torch.compile`'s.

        Returns:
            The compiled module; `report` says what was predicted and measured.

        Raises:
            InfeasibleBudgetError: no plan kept it.
            MemoptError: the graph or the strategy cannot be used.
        """
        call = to_call(inputs)
        loss = None if loss_fn is None else Loss(loss_fn, targets)
        resident = _resident_bytes(model, call)
        own = Partitioner(None, "store-all", self.device)
        run = _compiled(model, own, options)
        peak = resident + self._measured(own, run, model, call, loss)
        budget = parse_budget(self.budget, peak)
        within, one, rounds = budget, own, 1
        while peak > budget:
            if rounds > _ROUNDS:
                raise InfeasibleBudgetError(
                    f"{rounds} steps were measured, the last took {format_bytes(peak)}; the budget "
                    f"is {format_bytes(budget)}",
                    budget,
                    peak,
                )
            one = Partitioner(within, self.strategy, self.device)
            run = _compiled(model, one, options)
            peak = resident + self._measured(one, run, model, call, loss)
            predicted = within if one.plan is None else one.plan.peak_bytes
            last, within = within, min(within, predicted) - max(1, peak - budget)
            rounds += 1
        shown = within if one is own else last
        made = None if one is own or one.plan is None else one.plan.peak_bytes
        self.report = PartitionReport(budget, shown, made, peak, one.saved, one.recomputed, rounds)
        self.plan, self.saved, self.recomputed = one.plan, one.saved, one.recomputed
        return run

    def _measured(
        self, one: Partitioner, run: Any, model: nn.Module, call: Call, loss: Loss | None
    ) -> int:
        """Bytes of a step above what is resident; everything is put back."""
        call = call.detached()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))

        def step() -> Any:
            output = run(*call.args, **call.kwargs)
            backward(output, loss)
            return output

        with state_restored(model, call, *(loss.parts if loss else ())):
            clear_gradients(model, call.tensors())
            try:
                step()
            except Exception:
                if one.failure is not None:
                    raise one.failure from None
                raise
            clear_gradients(model, call.tensors())
            with metered(device) as use:
                held = step()
            del held
            clear_gradients(model, call.tensors())
        return use.peak_bytes


def _device(device: Any) -> Device:
    if isinstance(device, Device):
        return device
    if device is not None:
        return planned_device(device, "estimate")
    return measure_device()


def _compiled(model: nn.Module, one: Partitioner, options: dict[str, Any] | None) -> Any:
    more = {**(options or {}), "custom_partitioner_fn": one}
    return torch.compile(model, fullgraph=True, dynamic=False, options=more)


def _resident_bytes(model: nn.Module, call: Call) -> int:
    tensors = [*model.parameters(), *model.buffers(), *call.tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _recomputed(plan: PlanRecord) -> int:
    """How many operators of the forward a plan runs again."""
    runs = [one.op for _, one in plan.program.computes]
    return len(runs) - len(set(runs))


def _captured(gm: GraphModule, outputs: int) -> Captured:
    """A copy of Inductor's joint graph as memopt reads it, its nodes' names noted."""
    for node in gm.graph.nodes:
        node.meta[_NAME] = node.name
    graph = FxGraph()
    copies: dict[Node, Node] = {}
    results: Any = graph.graph_copy(gm.graph, copies)
    graph.output(results)
    module = GraphModule(gm, graph)
    primals, tangents = [], []
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise MemoptError(
                "memopt.partitioner plans one size: compile with dynamic=False, or leave "
                "mark_dynamic out"
            )
        if "tangents" in node.name:
            tangents.append(node)
        else:
            primals.append(Primal(node, "parameter", node.name))
    return Captured(
        module=module,
        primals=tuple(primals),
        tangents=tuple(tangents),
        forward_outputs=tuple(results[:outputs]),
        gradients=tuple(results[outputs:]),
        mutated=(),
        call=Call((), {}),
        compiled=lambda: None,
        hooks=Hooks(),
        model=weakref.ref(module),
    )


def _forward_nodes(gm: GraphModule) -> list[Node]:
    """The calls that no tangent reaches."""
    backward: set[Node] = set()
    found = []
    for node in gm.graph.nodes:
        given = node.op == "placeholder" and "tangents" in node.name
        if given or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            found.append(node)
    return found
