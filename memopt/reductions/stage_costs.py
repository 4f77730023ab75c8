"""Prices stages by replaying their own operators from what the chain holds around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memopt.models.chain import Stage
from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant, leanest, variant
from memopt.reductions.stage_map import StageMap


def stage_costs(graph: Graph, stage_map: StageMap) -> tuple[Stage, ...]:
    """Price stages 1..n of the chain, the loss boundary last.

    Peaks are measured from what the stage finds in memory; tensors are freed after their last
    reader except those the step leaves. Overheads are what exceeds the chain's own count. Operators
    that run only once (`StageOperators.once`) take their time in the loss stage's backward, which a
    schedule runs exactly once, so that a schedule's time is the program's.
    """
    costs = _Costs(graph, stage_map)
    stages = [costs.stage(k) for k in range(len(stage_map.stages))]
    return (*stages, costs.loss())


class _Costs:
    def __init__(self, graph: Graph, stage_map: StageMap) -> None:
        self.graph = graph
        self.stages = stage_map.stages
        self.held = stage_map.held
        self.sizes = [tensor.size_bytes for tensor in graph.tensors]

    def bytes(self, tensors: Iterable[int]) -> int:
        return sum([self.sizes[t] for t in tensors])

    def time_s(self, operators: Iterable[int]) -> float:
        return sum(self.graph.operators[i].time_s for i in operators)

    def stage(self, k: int) -> Stage:
        stage = self.stages[k]
        output = _set(stage.output)
        return Stage(
            forward_time_s=self.time_s(stage.rerun),
            backward_time_s=self.time_s(stage.backward),
            output_bytes=self.bytes(output),
            saved_bytes=self.bytes(stage.saved),
            gradient_bytes=self.bytes(stage.gradients),
            forward_overhead_bytes=self._forward_overhead(k, stage.saved),
            forward_no_save_overhead_bytes=self._forward_overhead(k, output),
            backward_overhead_bytes=self._backward_overhead(k),
            parameter_gradient_bytes=self.bytes(stage.results),
            name=stage_name(self.graph, stage.forward or stage.backward),
        )

    def _input(self, k: int) -> frozenset[int]:
        """Return a^{ℓ-1} of the stage at position k."""
        return _set(self.stages[k - 1].output) if k else frozenset()

    def _forward_overhead(self, k: int, targets: frozenset[int]) -> int:
        """Return o_f: the first run's or, if larger, a later one's, which rewrites held tensors."""
        stage, source = self.stages[k], self._input(k)
        first = self._peak(stage.forward, source, source | targets, self.held)
        if stage.rerun == stage.forward and not self._holds(stage.forward):
            again = first
        else:
            again = self._peak(stage.rerun, source, source | targets, frozenset())
        return max(first, again) - self.bytes(source) - self.bytes(targets)

    def _holds(self, operators: Sequence[int]) -> bool:
        """Tell whether any of these operators writes a held tensor."""
        return any(not self.held.isdisjoint(self.graph.operators[i].writes) for i in operators)

    def _backward_overhead(self, k: int) -> int:
        """Return o_b; negative where inputs are freed before the peak, or gradients pass on."""
        stage, source = self.stages[k], self._input(k)
        later = self.stages[k - 1].gradients if k else frozenset()
        before = source | stage.saved | stage.gradients
        peak = self._peak(stage.backward, before, source | later | stage.results, frozenset())
        counted = (source, stage.saved, stage.gradients, later, stage.results)
        return peak - sum(map(self.bytes, counted))

    def _peak(
        self,
        operators: Sequence[int],
        before: frozenset[int],
        after: frozenset[int],
        uncounted: frozenset[int],
    ) -> int:
        figures: list[Operator | Variant] = []
        needed = {*after, *uncounted}
        for i in reversed(operators):
            operator = self.graph.operators[i]
            if operator.implementations:
                wanted = needed.intersection(operator.writes)
                figures.append(variant(operator, leanest(operator, wanted, self.sizes)))
            else:
                figures.append(operator)
            needed.update(operator.reads)
        figures.reverse()
        return running_peak_bytes(figures, self.sizes, before, after, uncounted)

    def loss(self) -> Stage:
        """Price the loss boundary: the user's loss runs, the tangents arrive."""
        held = self.graph.kept.intersection(self.graph.tangents)
        unread = set(self.graph.tangents) - held - self.stages[-1].gradients
        return Stage(
            forward_time_s=0.0,
            backward_time_s=sum(self.time_s(stage.once) for stage in self.stages),
            output_bytes=0,
            saved_bytes=0,
            gradient_bytes=0,
            backward_overhead_bytes=self.graph.boundary_bytes + self.bytes(unread),
            parameter_gradient_bytes=self.bytes(held),
            name="loss",
        )


def running_peak_bytes(
    runs: Sequence[Operator | Variant],
    sizes: Sequence[int],
    before: frozenset[int],
    after: frozenset[int],
    uncounted: frozenset[int] = frozenset(),
) -> int:
    """Return the peak bytes of running operators, each under some implementation, starting with
    `before` and leaving `after`.

    Only written tensors and those of `before` count; `uncounted` ones never do.
    """
    last = {t: n for n, run in enumerate(runs) for t in run.reads}
    there = {t: sizes[t] for t in before if t in last or t in after}
    live = peak = sum(there.values())
    for n, run in enumerate(runs):
        written = [t for t in run.writes if t not in uncounted]
        own = sum([sizes[t] for t in written]) + run.workspace_bytes
        if written:
            # The program computes in place where a tensor that the operator may overwrite dies
            # here.
            ending = (t for t in run.in_place if last[t] == n and t not in after)
            own -= max((there.get(t, 0) for t in ending), default=0)
        peak = max(peak, live + own)
        for t in written:
            if (last.get(t, -1) > n or t in after) and t not in there:
                there[t] = sizes[t]
                live += sizes[t]
        for t in dict.fromkeys(run.reads):
            if last[t] == n and t not in after:
                live -= there.pop(t, 0)
    return max(peak, live)


def _set(tensor: int | None) -> frozenset[int]:
    return frozenset() if tensor is None else frozenset({tensor})


def stage_name(graph: Graph, operators: Sequence[int]) -> str:
    """Name a stage for people: the module its operators share, or the first and the last one."""
    modules = list(dict.fromkeys(graph.operators[i].module for i in operators))
    modules = [module for module in modules if module]
    if not modules:
        return graph.operators[operators[-1]].name if operators else ""
    shared: list[str] = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or f"{modules[0]}..{modules[-1]}"
