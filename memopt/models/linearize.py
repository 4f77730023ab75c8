"""From the graph of a training step to a chain (Rotor §3), and back to a program.

The forward graph is cut at single-storage articulation points; every captured model has a chain,
not only `nn.Sequential`. Stage ℓ's figures come from replaying its own operators. Three kinds of
computed storage are not part of the chain: they are held from their computation on, and charged
in `Chain.resident_bytes` from the start:

- storages without a parameter among their ancestors (masks, rotary tables, position ids) that
  cross a cut: all layers may read them. A parameter-free storage inside one stage is ordinary;
- the model's outputs, new buffer values included: they live to the end of the step anyway;
- what operators that must not run twice write.

The model's inputs are resident tensors of the graph, whether or not they need gradients, so a^0
has no bytes of its own: `Chain.input_bytes` is 0. The last stage is the loss boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopt.models.chain import Chain
from memopt.models.cuts import find_cuts, worthwhile
from memopt.models.graph import Graph
from memopt.models.program import Program
from memopt.models.stage_costs import stage_costs
from memopt.models.stage_map import StageMap, StageOperators, build_stage_map, has_updates
from memopt.models.steps import ChainStep


@dataclass(frozen=True)
class Linearization:
    """A graph seen as a chain.

    Attributes:
        graph: the graph.
        chain: its chain; stage n is the loss boundary.
        stage_map: the operators of stages 1..n-1, and the held storages.
        articulation_points: how many cuts the forward has; not all of them are worth a stage.
    """

    graph: Graph
    chain: Chain
    stage_map: StageMap
    articulation_points: int

    @property
    def stages(self) -> tuple[StageOperators, ...]:
        """The operators of stages 1..n-1; stage ℓ is `stages[ℓ-1]`."""
        return self.stage_map.stages

    @property
    def held(self) -> frozenset[int]:
        """Computed storages held for the whole step, part of `chain.resident_bytes`."""
        return self.stage_map.held

    @property
    def cut_tensors(self) -> tuple[int | None, ...]:
        """The storages a^0..a^{n-1}; None where the input or held storages are all there is."""
        return (None, *(stage.output for stage in self.stages))

    @property
    def longest_stage_share(self) -> float:
        """Share of the step's compute time in its longest stage, from 0 to 1.

        Near 1 the chain says little about the graph (long skip connections, as in a U-Net):
        a strategy for graphs is the answer.
        """
        times = [stage.forward_time_s + stage.backward_time_s for stage in self.chain.stages]
        if not any(times):
            times = [float(len(s.forward) + len(s.backward)) for s in self.stages]
        return max(times) / sum(times) if any(times) else 1.0

    def lower(self, steps: Sequence[ChainStep]) -> Program:
        """The program of a chain schedule; see `memopt.models.lower.lower_steps`."""
        from memopt.models.lower import lower_steps

        return lower_steps(self, steps)


def linearize(graph: Graph) -> Linearization:
    """Cut a graph into the stages of a chain.

    A graph without cuts, or without a backward, gives one stage and the loss boundary.

    Raises:
        ValueError: the graph has parameter updates.
    """
    if has_updates(graph):
        raise ValueError(
            "linearize: the step contains parameter updates, which a chain cannot express; "
            "profile without an optimizer, or use a strategy for graphs"
        )
    found = find_cuts(graph)
    trains = graph.first_backward < len(graph.operators)
    stage_map = build_stage_map(graph, worthwhile(graph, found) if trains else ())
    held_bytes = sum(graph.tensors[t].size_bytes for t in stage_map.held)
    chain = Chain(
        input_bytes=0,
        stages=stage_costs(graph, stage_map),
        resident_bytes=graph.resident_bytes + held_bytes,
    )
    return Linearization(graph, chain, stage_map, len(found))
