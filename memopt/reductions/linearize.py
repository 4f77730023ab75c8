"""From the graph of a training step to a chain (Rotor §3), and back to a program.

The forward graph is cut at single-storage articulation points; every captured model has a chain,
not only `nn.Sequential`. Stage ℓ's figures come from replaying its own operators. Some computed
storages are not part of the chain: they are held from their computation on, and charged in
`Chain.resident_bytes` from the start:

- storages without a parameter among their ancestors (masks, rotary tables, position ids) that
  cross a cut: all layers may read them. A parameter-free storage inside one stage is ordinary;
- the model's outputs, which live to the end of the step anyway, and new buffer values;
- what operators that must not run twice write;
- long skips, where that pays: storages that cross cuts and are read more than `max_span`
  operators after the one that writes them. Held, the skips of a U-Net or the features of a
  DenseNet no longer forbid cuts; they are saved for the backward anyway. Short spans also hold
  the trunk of a residual net, which makes finer chains with a higher smallest peak.

The model's inputs are resident tensors of the graph, whether or not they need gradients, so a^0
has no bytes of its own: `Chain.input_bytes` is 0. The last stage is the loss boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.models.last_of import LastOf
from memopt.models.steps import ChainStep
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.reductions.cuts import (
    Cut,
    always_held,
    crossing,
    find_cuts,
    long_lived,
    parameter_free,
    worthwhile,
)
from memopt.reductions.lower import lower_steps
from memopt.reductions.stage_costs import stage_costs
from memopt.reductions.stage_map import (
    StagedGraph,
    build_stage_map,
    has_updates,
)

_BEST = LastOf["Linearization"](kept=1)
_SPAN_DIVISORS = (2, 4, 8, 12, 16, 24, 32, 48)
"""`linearizations` tries spans of the number of forward operators divided by each."""
_FEWER_DIVISORS, _MANY = (4, 16, 48), 8000
"""Those instead where there are so many operators: each takes a third of a second."""


@dataclass(frozen=True)
class Linearization(StagedGraph):
    """A graph seen as a chain.

    Attributes:
        articulation_points: how many cuts the forward has; not all of them are worth a stage.
        max_span: longest span of a storage that is not held, in forward operators.
    """

    articulation_points: int
    max_span: int

    @cached_property
    def recomputing_peak_bytes(self) -> int:
        """Return the peak of recomputing every stage from the input for its backward: close to the
        smallest budget the chain allows."""
        chain, peak, path, results = self.chain, 0, 0, 0
        paths = [0]
        for index, stage in enumerate(chain.stages, start=1):
            ends = chain.activation_bytes(index - 1) + stage.output_bytes
            path = max(path, ends + stage.no_save_overhead_bytes)
            paths.append(path)
        for index in range(len(chain), 0, -1):
            stage = chain.stages[index - 1]
            inputs = chain.activation_bytes(index - 1) + stage.saved_bytes
            made = chain.gradient_bytes(index - 1) + stage.parameter_gradient_bytes
            forward = max(paths[index - 1], inputs + stage.forward_overhead_bytes)
            backward = inputs + made + stage.backward_overhead_bytes
            peak = max(peak, results + stage.gradient_bytes + max(forward, backward))
            results += stage.parameter_gradient_bytes
        return chain.resident_bytes + chain.input_bytes + peak

    def lower(self, steps: Sequence[ChainStep], budget_bytes: int | None = None) -> Program:
        """Lower a chain schedule to a program (see `memopt.reductions.lower.lower_steps`), with
        outputs computed in place where possible."""
        return with_in_place(self.graph, lower_steps(self, steps))


def linearize(graph: Graph, max_span: int | None = None) -> Linearization:
    """Cut a graph into the stages of a chain.

    A graph without cuts, or without a backward, gives one stage and the loss boundary.

    Args:
        graph: the training step.
        max_span: storages that span more forward operators are held if they cross a cut. None:
            the first of `linearizations` whose `recomputing_peak_bytes`, above the graph's
            resident bytes, no other betters by a twentieth.

    Raises:
        ValueError: the graph has parameter updates, or max_span is negative.
    """
    if max_span is not None:
        return _linearize(graph, _Plan.of(graph, max_span))
    return _BEST.of((graph,), None, lambda: _best(graph))


def _best(graph: Graph) -> Linearization:
    best, *others = linearizations(graph)
    for other in others:
        gain = best.recomputing_peak_bytes - other.recomputing_peak_bytes
        if 20 * gain > best.recomputing_peak_bytes - graph.resident_bytes:
            best = other
    return best


def linearizations(graph: Graph) -> tuple[Linearization, ...]:
    """Return the linearizations worth trying, from the one that holds least to the one with most.

    A planner with time to spare may solve each of them and keep the best program.

    Raises:
        ValueError: the graph has parameter updates.
    """
    found: dict[_Plan, Linearization] = {}
    many = len(graph.operators) >= _MANY
    for divisor in (1, *(_FEWER_DIVISORS if many else _SPAN_DIVISORS)):
        plan = _Plan.of(graph, graph.first_backward // divisor)
        if plan not in found:
            found[plan] = _linearize(graph, plan)
    return tuple(found.values())


@dataclass(frozen=True)
class _Plan:
    """A way to cut a graph: the cuts, and the storages that are held because of them. Plans with
    the same cuts and held storages are equal."""

    cuts: tuple[Cut, ...]
    skips: frozenset[int]
    articulation_points: int = field(compare=False)
    max_span: int = field(compare=False)

    @staticmethod
    def of(graph: Graph, max_span: int) -> _Plan:
        """Plan the cuts worth making if storages spanning over `max_span` operators are held."""
        if max_span < 0:
            raise ValueError(f"linearize: max_span must be at least 0, got {max_span}")
        skips = long_lived(graph, max_span) - parameter_free(graph) - always_held(graph)
        found = find_cuts(graph, skips)
        trains = graph.first_backward < len(graph.operators)
        cuts = worthwhile(graph, found) if trains else ()
        return _Plan(cuts, crossing(graph, cuts, skips), len(found), max_span)


def _linearize(graph: Graph, plan: _Plan) -> Linearization:
    if has_updates(graph):
        raise ValueError(
            "linearize: the step contains parameter updates, which a chain cannot express; "
            "profile without an optimizer, or use a strategy for graphs"
        )
    stage_map = build_stage_map(graph, plan.cuts, plan.skips)
    held_bytes = sum(graph.tensors[t].size_bytes for t in stage_map.held)
    chain = Chain(
        input_bytes=0,
        stages=stage_costs(graph, stage_map),
        resident_bytes=graph.resident_bytes + held_bytes,
    )
    return Linearization(graph, chain, stage_map, plan.articulation_points, plan.max_span)
