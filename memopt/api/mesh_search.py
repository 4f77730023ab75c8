"""The mesh of data × tensor × pipe × context ranks on which a step has the most tokens/s."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from memopt.api.cluster import examples_of, shared_over, tokens_of
from memopt.api.forward_again import forward_again
from memopt.api.reserved import fastest_within, reserved_bytes
from memopt.api.solving import solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import MINIMUM, WrittenBudget
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Phase, TensorKind
from memopt.models.mesh import Mesh, in_flight, pipeline_turns
from memopt.models.options import Pricing, StepOptions
from memopt.plan_record import PlanRecord
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import lifetimes
from memopt.reductions.block_checkpoints import block_of, forward_of_blocks
from memopt.report.ladder import RECOMPUTE, MeshRung, Rung, busy_shares
from memopt.stages import profiled_for
from memopt.strategies import resolve
from memopt.strategies.target import chain_view

if TYPE_CHECKING:
    from memopt.profiler.variants import VariantStep

Load: TypeAlias = Callable[[int], tuple[Any, Any]]
"""A number of parts of the sequence → a model on meta and one part's inputs."""
BATCHES_OF_A_STAGE = 4
"""Micro-batches of a pipeline's step, for each of its stages: a fifth of the time fills it."""
_FAR = 2**62


class MeshSearch:
    """Plans one rank of each mesh. Its figures hold for every rank: of a pipeline it stands for a
    stage with the first stage's embedding table and micro-batches in flight, and the last stage's
    loss.

    Args:
        load: gives the model, with as much of the sequence as one rank of a context has.
        device: of a rank.
        budget_bytes: of its memory.
        optimizer: a name; None: no state is charged.
        step: the loss, and what the step returns.
    """

    def __init__(
        self,
        load: Load,
        device: Device,
        budget_bytes: int,
        optimizer: str | None,
        step: StepOptions,
    ) -> None:
        self._load, self._device, self._optimizer = load, device, optimizer
        self._budget_bytes, self._options = budget_bytes, step

    def search(
        self, ranks: int, contexts: bool, heard: Callable[[MeshRung], None]
    ) -> tuple[MeshRung, ...]:
        """Try meshes of so many ranks: first data parallelism alone, then, from the best mesh so
        far, twice the ranks along tensor, pipe or context, while that is better."""
        network = self._device.network
        within = 1 if network is None else network.ranks_per_node
        tried: dict[Mesh, MeshRung] = {}

        def tried_all(sizes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
            found = []
            for pipe, context, tensor in sizes:
                data, rest = divmod(ranks, pipe * context * tensor)
                if rest or not data or tensor > within:
                    continue
                found.append((pipe, context, tensor))
                mesh = _mesh(pipe, data, context, tensor)
                if mesh not in tried:
                    tried[mesh] = self.rung(mesh)
                    heard(tried[mesh])
            return found

        def worth(sizes: tuple[int, int, int]) -> tuple[bool, float]:
            pipe, context, tensor = sizes
            mesh = _mesh(pipe, ranks // (pipe * context * tensor), context, tensor)
            rung = tried[mesh].rung
            return rung.fits, rung.rate_of_one or -float(rung.needed_bytes or _FAR)

        (best,) = tried_all([(1, 1, 1)])
        while True:
            pipe, context, tensor = best
            next_ones = [(2 * pipe, context, tensor), (pipe, context, 2 * tensor)]
            next_ones += [(pipe, 2 * context, tensor)] * contexts
            better = max((best, *tried_all(next_ones)), key=worth)
            if better == best:
                return tuple(tried.values())
            best = better

    def rung(self, mesh: Mesh) -> MeshRung:
        """Plan one rank of a mesh: as it is, or recomputed."""
        try:
            graph, step, samples = self._step(mesh)
        except (ValueError, RuntimeError, MemoptError) as error:
            why = str(error).partition("\n")[0]
            return MeshRung(mesh, Rung((), False, ranks=mesh.ranks), why)
        figures = step.with_optimizer(self._optimizer)
        held = figures.state.bytes_total
        stages = mesh.size("pipe")
        batches = BATCHES_OF_A_STAGE * stages if stages > 1 else 1
        if batches > 1:
            held += figures.trained_bytes  # Sums, beside a micro-batch's own gradients.
        graph = replace(graph, extra_resident_bytes=graph.extra_resident_bytes + held)
        least: int | None = None
        for strategy in ("store-all", "rotor"):
            try:
                plan, needed = self._fitting(graph, strategy, in_flight(stages, batches) - 1)
            except ValueError:
                continue  # no chain
            least = needed if least is None else min(least, needed)
            if needed > self._budget_bytes:
                continue
            sent_s = 2 * self._sent_s(graph, mesh) if stages > 1 else 0.0
            turn_s = plan.step_time_s + sent_s
            step_s = pipeline_turns(stages, batches) * turn_s + figures.update_s(self._device)
            rung = Rung(
                changes=(RECOMPUTE,) * (strategy == "rotor"),
                fits=True,
                strategy=strategy,
                peak_bytes=needed,
                needed_bytes=needed,
                step_time_s=step_s,
                samples_per_s=samples * batches * mesh.batches / step_s,
                ranks=mesh.ranks,
                trained=figures.trained,
                busy=self._busy(plan, sent_s, batches / step_s),
                plan=plan,
            )
            return MeshRung(mesh, rung)
        return MeshRung(mesh, Rung((), False, needed_bytes=least, ranks=mesh.ranks))

    def _step(self, mesh: Mesh) -> tuple[Graph, VariantStep, int]:
        """Return the graph of a rank's micro-batch, its step, and the micro-batch's tokens."""
        from memopt.profiler.shallow import block_lists, meta_copy
        from memopt.profiler.variants import StepVariant, Variants

        context, tensor, pipe = (mesh.size(name) for name in ("context", "tensor", "pipe"))
        model, inputs = self._load(context)
        if pipe > 1:
            lists = block_lists(model)
            if len(lists) != 1 or lists[0].count <= pipe:
                raise ValueError(f"its blocks are not one list of more than {pipe}")
            model = meta_copy(model, [replace(lists[0], kept=-(-lists[0].count // pipe))])

        def price(built: Any, given: Any, kernels: str) -> Any:
            how = Pricing(self._device, "estimate", kernels)
            options, device = self._options, self._device
            return profiled_for(built, given, options, how, device, lambda _s, _w: None)

        spread = mesh.size("data") * context
        variants = Variants(
            model, inputs, self._device, price, lambda m, _: shared_over(m, spread, tensor)
        )
        step = variants.step(StepVariant(ranks=spread))
        graph = step.graph
        if context > 1:
            graph = in_context(graph, context, tensor, self._device)
        # One rank's inputs are a part of the sequence, of which `Mesh.batches` counts one whole.
        return graph, step, context * (tokens_of(inputs) or examples_of(inputs))

    def _fitting(self, graph: Graph, strategy: str, more: int) -> tuple[PlanRecord, int]:
        """Return the fastest plan found within the budget beside the activations of `more`
        micro-batches, and what it needs of the budget; else the one that needs the least."""
        limit, chosen = self._budget_bytes, resolve(strategy)
        view = None if strategy == "store-all" else chain_view(graph)

        @cache
        def solve_for(size: WrittenBudget) -> PlanRecord:
            return solve(graph, size, chosen, device=self._device, view=view)

        def solve_again(size: WrittenBudget) -> PlanRecord:
            plan = solve_for(size)
            return forward_again(plan) or plan

        def used(plan: PlanRecord) -> int:
            needed = max(plan.peak_bytes, reserved_bytes(plan))
            return needed + more * kept_bytes(plan.graph, plan.program)

        def refusal(size: int) -> InfeasibleBudgetError:
            return InfeasibleBudgetError("no room", size)

        if strategy == "store-all":
            plan = solve_for(None)
            return plan, used(plan)
        # Other micro-batches keep less of a forward that runs again.
        ways = (solve_for, solve_again) if more else (solve_for,)
        found: list[PlanRecord] = []
        for way in ways:
            with suppress(InfeasibleBudgetError):
                found.append(fastest_within(way, limit, used, refusal)[1])
        if found:
            plan = min(found, key=lambda one: one.step_time_s)
        else:
            plan = min((way(MINIMUM) for way in ways), key=used)
        return plan, used(plan)

    def _sent_s(self, graph: Graph, mesh: Mesh) -> float:
        """Return the seconds in which a stage sends a micro-batch's result to the next one."""
        blocks = list(forward_of_blocks(graph).values())
        sizes = [0]
        for one, following in pairwise(blocks):
            made = {tensor for index in one for tensor in graph.operators[index].writes}
            read = {tensor for index in following for tensor in graph.operators[index].reads}
            sizes.append(sum(graph.tensors[tensor].size_bytes for tensor in made & read))
        stride = mesh.ranks // mesh.size("pipe")
        sent = Collective(CollectiveKind.BROADCAST, 2, max(sizes), stride)
        return self._device.collective_time_s(sent)

    def _busy(self, plan: PlanRecord, sent_s: float, per_s: float) -> dict[str, float]:
        """Return stream → share of a whole step that it works."""
        busy = busy_shares(plan.graph, plan.program, self._device)
        found = {stream: share * plan.step_time_s * per_s for stream, share in busy.items()}
        if sent_s:
            found["network"] = found.get("network", 0.0) + sent_s * per_s
        return found


def _mesh(pipe: int, data: int, context: int, tensor: int) -> Mesh:
    """Return a mesh of these, the outermost first, without dimensions of one rank but data."""
    sizes = {"pipe": pipe, "data": data, "context": context, "tensor": tensor}
    return Mesh(**{name: size for name, size in sizes.items() if size > 1 or name == "data"})


def kept_bytes(graph: Graph, program: Program) -> int:
    """Return the bytes that a micro-batch's blocks keep between its forward and its backward,
    inputs included. The loss is left out: a stage computes one micro-batch's at a time."""
    boundary = program.boundary
    assert boundary is not None
    of_blocks = {
        tensor
        for operator in graph.operators
        if block_of(operator.module)
        for tensor in (*operator.reads, *operator.writes)
        if graph.tensors[tensor].kind is not TensorKind.PARAMETER
    }
    living = lifetimes(graph, program).device
    held = (one.tensor for one in living if one.begin < boundary < one.end)
    return sum(graph.tensors[one].size_bytes for one in held if one in of_blocks)


FUSED = "_scaled_dot_product"
"""In the target of an attention whose scores are never whole."""


def ring_s(
    time_s: float,
    keys_bytes: int,
    ranks: int,
    stride: int,
    backward: bool,
    device: Device,
    compiled: bool = False,
) -> float:
    """Return the seconds of an attention to the keys of a whole context, as `context_parallel`
    computes it (torch/distributed/tensor/experimental/_attention.py).

    All ranks' keys are gathered beside the first part's work; in the backward a part's gradients
    are sent on in float32 beside the next part's work. Under `torch.compile` nothing overlaps: a
    traced collective is waited for at once, and Inductor moves no wait.

    Args:
        time_s: to the keys of one rank.
        keys_bytes: of all ranks' keys and values, in half precision.
        ranks: that share the context.
        stride: between them.
        backward: whether it is the backward.
        device: with its network.
        compiled: whether `torch.compile` traces it.
    """
    gather = Collective(CollectiveKind.ALL_GATHER, ranks, keys_bytes, stride)
    gather_s = device.collective_time_s(gather)
    sent_s = 2 * gather_s / (ranks - 1)
    if compiled:
        return ranks * time_s + gather_s + backward * ranks * sent_s
    first_s = max(time_s, gather_s)
    if not backward:
        return first_s + (ranks - 1) * time_s
    return first_s + (ranks - 1) * max(time_s, sent_s) + sent_s


def in_context(graph: Graph, ranks: int, stride: int, device: Device) -> Graph:
    """Return a graph of one part of a sequence, whose attentions meet the keys of `ranks` parts;
    those are charged as their workspace.

    Raises:
        ValueError: it has no fused attention.
    """
    keys: dict[str, int] = {}
    found: list[Operator] = []
    for operator in graph.operators:
        if FUSED not in operator.target:
            found.append(operator)
            continue
        backward = operator.phase is Phase.BACKWARD
        if not backward:
            read = [graph.tensors[one].size_bytes for one in operator.reads]
            result = max(graph.tensors[one].size_bytes for one in operator.writes)
            keys[operator.module] = ranks * max(0, sum(read) - result)
        size = keys[operator.module]
        time_s = ring_s(operator.time_s, size, ranks, stride, backward, device)
        more = operator.workspace_bytes + size
        found.append(replace(operator, time_s=time_s, workspace_bytes=more))
    if not keys:
        raise ValueError("it has no fused attention (scaled_dot_product_attention)")
    return replace(graph, operators=tuple(found))
