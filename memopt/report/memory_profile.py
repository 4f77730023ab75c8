"""Device memory over a step, split by what it holds. Sums equal the replay's, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph, TensorKind
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, LossBoundary, Program, SwapIn
from memopt.programs.replay import replay

PARAMETERS = "parameters"
RESIDENT = "other resident"
ACTIVATIONS = "activations"
OUTPUTS = "outputs"
GRADIENTS = "gradients"
WORKSPACE = "workspace"
LAYERS = (PARAMETERS, RESIDENT, ACTIVATIONS, OUTPUTS, GRADIENTS, WORKSPACE)
"""From the bottom of the stack to its top. Workspace: what a kernel needs while it runs, and the
loss's own memory at the boundary."""

_LAYER_OF_KIND = {
    TensorKind.PARAMETER: PARAMETERS,
    TensorKind.ACTIVATION: ACTIVATIONS,
    TensorKind.OUTPUT: OUTPUTS,
    TensorKind.GRADIENT: GRADIENTS,
}


@dataclass(frozen=True)
class MemoryProfile:
    """Memory during each instruction.

    Attributes:
        start_s: when each one starts, seconds; ascending.
        end_s: the end of the step.
        layers: what it holds → bytes during each instruction.
        backward_s: when the backward starts; None: there is none.
    """

    start_s: tuple[float, ...]
    end_s: float
    layers: dict[str, tuple[int, ...]]
    backward_s: float | None

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Memory during each instruction."""
        return tuple(sum(parts) for parts in zip(*self.layers.values(), strict=True))


def layer_of(graph: Graph, tensor: int) -> str:
    """The layer a tensor belongs to."""
    return _LAYER_OF_KIND.get(graph.tensors[tensor].kind, RESIDENT)


def program_profile(graph: Graph, program: Program, device: Device | None = None) -> MemoryProfile:
    """The memory of a program; see `memopt.programs.replay` for what is counted when."""
    timeline = replay(graph, program, device)
    level = dict.fromkeys(LAYERS, 0)
    for tensor in graph.resident:
        level[layer_of(graph, tensor)] += graph.tensors[tensor].size_bytes
    level[RESIDENT] += graph.extra_resident_bytes
    live: set[int] = set()
    rows: list[dict[str, int]] = []
    backward_s: float | None = None

    def appear(tensors: tuple[int, ...]) -> None:
        for tensor in tensors:
            if tensor not in live:
                live.add(tensor)
                level[layer_of(graph, tensor)] += graph.tensors[tensor].size_bytes

    def vanish(tensor: int) -> None:
        live.remove(tensor)
        level[layer_of(graph, tensor)] -= graph.tensors[tensor].size_bytes

    for position, instruction in enumerate(program):
        during = dict(level)
        if isinstance(instruction, Compute):
            chosen = variant(graph.operators[instruction.op], instruction.implementation)
            for tensor in chosen.writes:
                during[layer_of(graph, tensor)] += graph.tensors[tensor].size_bytes
            during[WORKSPACE] += chosen.workspace_bytes
            if instruction.in_place is not None:
                taken = graph.tensors[instruction.in_place]
                during[layer_of(graph, instruction.in_place)] -= taken.size_bytes
                vanish(instruction.in_place)
            appear(instruction.outputs)
        elif isinstance(instruction, LossBoundary):
            backward_s = timeline.end_s[position]
            appear(graph.tangents)
            during = dict(level)
            during[WORKSPACE] += graph.boundary_bytes
        elif isinstance(instruction, SwapIn):
            appear((instruction.tensor,))
            during = dict(level)
        elif isinstance(instruction, Free):
            vanish(instruction.tensor)
        rows.append(during)
    layers = {name: tuple(row[name] for row in rows) for name in LAYERS}
    return MemoryProfile(timeline.start_s, timeline.time_s, layers, backward_s)
