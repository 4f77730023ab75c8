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

import contextlib
import hashlib
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from memopt.api.solving import planned_device, solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import MINIMUM, WrittenBudget, format_bytes, parse_budget
from memopt.models.device import Device
from memopt.models.graph import Graph, Phase
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
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import store_all, with_frees
from memopt.programs.replay import replay
from memopt.reductions.chain_view import ChainView
from memopt.strategies import Strategy, resolve
from memopt.strategies.target import chain_view

_NAME = "memopt_node"
_ROUNDS = 6
_STEPS = 16
"""Parts of what lies between a strategy's smallest peak and store-all's, at each of which it is
asked: a plan that makes values again more than once may take more where that is not done."""


@dataclass(frozen=True)
class PartitionReport:
    """What became of a budget.

    Attributes:
        budget_bytes: as asked for.
        planned_within_bytes: what the last plan was made for.
        predicted_peak_bytes: of what it saves, each other value made again once.
        measured_peak_bytes: of a real step, with all that is resident.
        saved, recomputed: forward operators whose results are kept, and that run again.
        rounds: steps measured.
    """

    budget_bytes: int
    planned_within_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    saved: int
    recomputed: int
    rounds: int

    def __str__(self) -> str:
        return (
            f"budget {format_bytes(self.budget_bytes)}, measured peak "
            f"{format_bytes(self.measured_peak_bytes)} (predicted "
            f"{format_bytes(self.predicted_peak_bytes)}) after {self.rounds} rounds; {self.saved} "
            f"values saved, {self.recomputed} operators rerun"
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
        self.predicted_peak_bytes = 0
        self.saved = self.recomputed = 0
        self._kept: frozenset[int] = frozenset()
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
        forward = {node.name for node in _forward_nodes(gm) if not _is_view(node)}
        halves = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self.recomputed = sum(node.name in forward for node in halves[1].graph.nodes)
        return halves

    def _choose(self, gm: GraphModule, outputs: int) -> None:
        """Tag the forward's nodes with what the plan does."""
        captured = _captured(gm, outputs)
        model, blocks = nn.Module(), self.device.block_bytes
        lowering = build(model, captured, blocks)
        made, regions = planned_regions(model, captured, lowering, "compiled", blocks)
        lowering = made.lowering
        graph = with_costs(lowering, estimate_costs(lowering, self.device, regions))
        self._plan(graph)
        if self.budget is not None:
            self._tag(gm, lowering)

    def _plan(self, graph: Graph) -> None:
        """Find the fastest choice of what is saved whose own peak is within the budget, among
        those that the strategy makes within all budgets."""
        whole = store_all(graph)
        base = replay(graph, whole)
        limit = None if self.budget is None else parse_budget(self.budget, base.peak_bytes)
        if limit is None or base.peak_bytes <= limit:
            self.predicted_peak_bytes, self._kept = base.peak_bytes, _kept(graph, whole)
            return
        view = chain_view(graph)  # made once for all that are solved
        least = solve(graph, MINIMUM, self.strategy, device=self.device, view=view)
        room = base.peak_bytes - least.peak_bytes
        tries = [least.peak_bytes + room * part // _STEPS for part in range(1, _STEPS)]
        best: tuple[float, int, frozenset[int]] | None = None
        smallest = base.peak_bytes
        for plan in (least, *self._plans(view, tries)):
            kept = _kept_by(plan)
            once = _once(graph, kept)
            figures = replay(graph, once)
            smallest = min(smallest, figures.peak_bytes)
            if figures.peak_bytes <= limit and (best is None or figures.time_s < best[0]):
                best = figures.time_s, figures.peak_bytes, kept
        if best is None:
            raise InfeasibleBudgetError(
                f"{self.strategy.name} finds nothing to save with which Inductor's step, which "
                f"makes each value again at most once, takes at most {format_bytes(limit)}: the "
                f"smallest peak is {format_bytes(smallest)}",
                limit,
                smallest,
            )
        _, self.predicted_peak_bytes, self._kept = best

    def _plans(self, view: ChainView, budgets: Sequence[int]) -> Iterator[PlanRecord]:
        for budget in budgets:
            with contextlib.suppress(InfeasibleBudgetError):
                yield solve(view.graph, budget, self.strategy, device=self.device, view=view)

    def _tag(self, gm: GraphModule, lowering: Lowering) -> None:
        """Tell torch's partitioner what is saved, and that all else may be made again."""
        kept = self._kept & set(lowering.graph.producer)
        names = {lowering.bases[t].meta.get(_NAME) for t in kept if t in lowering.bases}
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
        one = Partitioner(None, self.strategy, self.device)
        run = _compiled(model, one, options)
        peak = resident + one._measured(run, model, call, loss)
        budget = parse_budget(self.budget, peak)
        if budget is None:
            raise ValueError('name a budget: bytes, a share, or a string with a unit ("6GiB")')
        within, last, rounds = budget, budget, 1
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
            peak = resident + one._measured(run, model, call, loss)
            last, within = within, one.predicted_peak_bytes - max(1, peak - budget)
            rounds += 1
        self.report = PartitionReport(
            budget, last, one.predicted_peak_bytes, peak, one.saved, one.recomputed, rounds
        )
        return run

    def _measured(self, run: Any, model: nn.Module, call: Call, loss: Loss | None) -> int:
        """Bytes of a step above what is resident; everything is put back."""
        call = call.detached()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))

        def step() -> Any:
            output = run(*call.args, **call.kwargs)
            backward(output, loss)
            return output

        with state_restored(model, call, *(loss.parts if loss else ())) as kept:
            kept.keep_all()
            clear_gradients(model, call.tensors())
            try:
                # What is found in AOTAutograd's cache is divided already; Inductor's own is used.
                with functorch_config.patch(enable_autograd_cache=False):
                    step()
            except Exception:
                if self.failure is not None:
                    raise self.failure from None
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


def _kept_by(plan: PlanRecord) -> frozenset[int]:
    """What a plan has in memory at the loss boundary."""
    program = plan.program
    if program.has_transfers:
        raise MemoptError(
            f"strategy {plan.strategy.name!r} moves tensors to the host, which Inductor's own "
            'pipeline does not: name one that recomputes ("rotor", "monet"), or use '
            'torch.compile(backend="memopt")'
        )
    return _kept(plan.graph, program)


def _kept(graph: Graph, program: Program) -> frozenset[int]:
    boundary = program.boundary
    if boundary is None:
        return frozenset()
    lives = lifetimes(graph, program).device
    return frozenset(life.tensor for life in lives if life.is_live_at(boundary))


def _once(graph: Graph, kept: frozenset[int]) -> Program:
    """The step as Inductor runs it: what the backward reads and is not saved is made again before
    its first reader there, and stays until its last."""
    backward = [i for i, one in enumerate(graph.operators) if one.phase is not Phase.FORWARD]
    forward = range(len(graph.operators) - len(backward))
    instructions: list[Instruction] = [Compute(op, ()) for op in forward]
    instructions.append(LossBoundary())
    there = set(kept) | {t for t in range(len(graph.tensors)) if t not in graph.producer}
    there |= set(graph.outputs)
    for op in backward:
        stack = [op]
        while stack:
            missing = {t for t in graph.operators[stack[-1]].reads if t not in there}
            if missing:
                stack.append(graph.producer[min(missing)])
            else:
                done = stack.pop()
                instructions.append(Compute(done, ()))
                there |= set(graph.operators[done].writes)
    return Program(with_frees(graph, instructions))


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
        given=(),
        call=Call((), {}),
        compiled=lambda: None,
        hooks=Hooks(),
        model=weakref.ref(module),
    )


def _is_view(node: Node) -> bool:
    """Whether a call only looks into what it reads."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(one.alias_info is not None for one in schema.returns)


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
