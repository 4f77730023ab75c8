"""Device memory over a step, split into layers. Their sums are the replay's, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph, TensorKind
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import Lifetime, bytes_during, lifetimes
from memopt.programs.moved import resident_under
from memopt.programs.replay import replay

PARAMETERS = "parameters"
RESIDENT = "other resident"
ACTIVATIONS = "activations"
OUTPUTS = "outputs"
GRADIENTS = "gradients"
WORKSPACE = "workspace"
LAYERS = (PARAMETERS, RESIDENT, ACTIVATIONS, OUTPUTS, GRADIENTS, WORKSPACE)
"""Layers from the bottom of the stack to its top. Workspace is what a kernel needs while it runs;
at the boundary, the loss's own memory."""

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
        start_s: when each instruction starts, seconds; ascending.
        end_s: the end of the step, seconds.
        layers: layer → bytes during each instruction.
        backward_s: when the backward starts; None: there is none.
    """

    start_s: tuple[float, ...]
    end_s: float
    layers: dict[str, tuple[int, ...]]
    backward_s: float | None

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Return the memory during each instruction, bytes."""
        return tuple(sum(parts) for parts in zip(*self.layers.values(), strict=True))


def layer_of(graph: Graph, tensor: int) -> str:
    """Return the layer that a tensor belongs to."""
    return _LAYER_OF_KIND.get(graph.tensors[tensor].kind, RESIDENT)


def program_profile(graph: Graph, program: Program, device: Device | None = None) -> MemoryProfile:
    """Profile a program's memory; see `memopt.programs.replay` for what counts when."""
    timeline = replay(graph, program, device)
    fixed = dict.fromkeys(LAYERS, 0)
    for tensor in resident_under(graph, program):
        fixed[layer_of(graph, tensor)] += graph.tensors[tensor].size_bytes
    fixed[RESIDENT] += graph.extra_resident_bytes
    members: dict[str, list[Lifetime]] = {name: [] for name in LAYERS}
    for lifetime in lifetimes(graph, program).device:
        members[layer_of(graph, lifetime.tensor)].append(lifetime)
    layers = {
        name: tuple(fixed[name] + size for size in bytes_during(graph, listed, len(program)))
        for name, listed in members.items()
    }
    layers[WORKSPACE] = tuple(one.effects(graph).workspace_bytes for one in program)
    backward_s = None if program.boundary is None else timeline.end_s[program.boundary]
    return MemoryProfile(timeline.start_s, timeline.time_s, layers, backward_s)
