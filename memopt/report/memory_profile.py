"""Device memory over a step, split by what it holds. Sums equal the replay's, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph, TensorKind
from memopt.models.steps import ChainStep, Move
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import Lifetime, bytes_during, lifetimes
from memopt.programs.replay import replay
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.offload_replay import has_transfers, replay_offload

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
    """Memory during each instruction or chain step.

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
    fixed = dict.fromkeys(LAYERS, 0)
    for tensor in graph.resident:
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


def chain_profile(
    chain: Chain, steps: tuple[ChainStep, ...], device: Device | None = None
) -> MemoryProfile:
    """The memory of a chain schedule. What the replay charges beyond the values is workspace."""
    start_s: tuple[float, ...]
    if has_transfers(steps):
        moved = replay_offload(chain, steps, device)
        start_s, end_s, totals = moved.start_s, moved.time_s, moved.step_bytes
    else:
        timeline = replay_chain(chain, steps)
        totals, end_s = timeline.step_bytes, timeline.time_s
        start_s = _starts(chain, steps)
    activations, saved, parameter_gradients = {0}, set[int](), 0
    gradient = len(chain)
    rows = []
    backward_s: float | None = None
    for position, step in enumerate(steps):
        stage = chain.stages[step.stage - 1]
        if step.move in (Move.FORWARD_NO_SAVE, Move.FORWARD_CHECKPOINT):
            activations.add(step.stage)
        elif step.move in (Move.FORWARD_ALL, Move.PREFETCH):
            (saved if step.stage else activations).add(step.stage)
        gradients = chain.gradient_bytes(gradient) + parameter_gradients
        if step.move is Move.BACKWARD:
            backward_s = start_s[position] if backward_s is None else backward_s
            parameter_gradients += stage.parameter_gradient_bytes
            gradients += chain.gradient_bytes(step.stage - 1) + stage.parameter_gradient_bytes
            gradient = step.stage - 1
        held = sum(chain.activation_bytes(i) for i in activations)
        held += sum(chain.stages[i - 1].saved_bytes for i in saved)
        rest = max(0, totals[position] - chain.resident_bytes - held)
        gradients = min(gradients, rest)
        rows.append((chain.resident_bytes, held, gradients, rest - gradients))
        _leave(step, activations, saved)
    columns = tuple(zip(*rows, strict=True))
    layers = dict(zip((RESIDENT, ACTIVATIONS, GRADIENTS, WORKSPACE), columns, strict=True))
    return MemoryProfile(start_s, end_s, layers, backward_s)


def _leave(step: ChainStep, activations: set[int], saved: set[int]) -> None:
    """Drop what a step frees."""
    if step.move in (Move.FORWARD_NO_SAVE, Move.BACKWARD):
        if step.stage > 1:
            activations.discard(step.stage - 1)
    elif step.move is Move.DROP_ACTIVATION:
        activations.discard(step.stage)
    if step.move in (Move.BACKWARD, Move.DROP_SAVED, Move.RELEASE):
        (saved if step.stage else activations).discard(step.stage)


def _starts(chain: Chain, steps: tuple[ChainStep, ...]) -> tuple[float, ...]:
    """When each step of a schedule without transfers starts, seconds."""
    now_s = 0.0
    starts = []
    for step in steps:
        starts.append(now_s)
        stage = chain.stages[step.stage - 1]
        if step.move is Move.BACKWARD:
            now_s += stage.backward_time_s
        elif step.move in (Move.FORWARD_NO_SAVE, Move.FORWARD_CHECKPOINT, Move.FORWARD_ALL):
            now_s += stage.forward_time_s
    return tuple(starts)
