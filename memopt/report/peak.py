"""What fills the memory at a plan's peak."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, LossBoundary, Program, SwapIn
from memopt.programs.replay import replay


@dataclass(frozen=True, slots=True)
class Consumer:
    """A tensor, or a kernel's workspace, that takes memory at the peak.

    Attributes:
        size_bytes: how much.
        kind: "activation", "parameter", "workspace"...
        name: of the tensor, after the module whose operator writes it.
    """

    size_bytes: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of the largest memory.

    Attributes:
        where: the instruction, for people.
        share: how far into the step it is, from 0 to 1, by time.
        consumers: everything in memory, largest first; the parameters as one.
    """

    where: str
    share: float
    consumers: tuple[Consumer, ...]


def peak_of(graph: Graph, program: Program, device: Device | None = None) -> Peak | None:
    """What is in memory at the peak; None for an empty program."""
    timeline = replay(graph, program, device)
    peak = timeline.peak_instruction
    if peak is None:
        return None
    live: set[int] = set()
    for instruction in program.instructions[:peak]:
        _advance(graph, instruction, live)
    instruction = program.instructions[peak]
    tensors = sorted(live)
    consumers: list[Consumer] = []
    where = "the loss"
    if isinstance(instruction, Compute):
        operator = graph.operators[instruction.op]
        chosen = variant(operator, instruction.implementation)
        tensors += chosen.writes
        where = _named(operator.module, operator.name)
        consumers.append(Consumer(chosen.workspace_bytes, "workspace", where))
    elif isinstance(instruction, LossBoundary):
        tensors += [tensor for tensor in graph.tangents if tensor not in live]
        consumers.append(Consumer(graph.boundary_bytes, "workspace", "your loss"))
    elif isinstance(instruction, SwapIn):
        tensors.append(instruction.tensor)
        where = f"the return of {_tensor_name(graph, instruction.tensor)}"
    consumers += [
        Consumer(graph.tensors[t].size_bytes, str(graph.tensors[t].kind), _tensor_name(graph, t))
        for t in tensors
    ]
    consumers += _resident(graph)
    consumers.sort(key=lambda consumer: -consumer.size_bytes)
    share = timeline.start_s[peak] / timeline.time_s if timeline.time_s > 0 else 0.0
    return Peak(where, share, tuple(c for c in consumers if c.size_bytes > 0))


def _advance(graph: Graph, instruction: object, live: set[int]) -> None:
    if isinstance(instruction, Compute):
        live.difference_update({instruction.in_place})
        live.update(instruction.outputs)
    elif isinstance(instruction, LossBoundary):
        live.update(graph.tangents)
    elif isinstance(instruction, SwapIn):
        live.add(instruction.tensor)
    elif isinstance(instruction, Free):
        live.discard(instruction.tensor)


def _named(module: str, name: str) -> str:
    return f"{module}: {name}" if module else name


def _tensor_name(graph: Graph, tensor: int) -> str:
    producer = graph.producer.get(tensor)
    module = "" if producer is None else graph.operators[producer].module
    return _named(module, graph.tensors[tensor].name)


def _resident(graph: Graph) -> list[Consumer]:
    """What never moves, one entry per kind."""
    sizes: dict[str, list[int]] = {}
    for tensor in graph.resident:
        kind = str(graph.tensors[tensor].kind)
        sizes.setdefault(kind, []).append(graph.tensors[tensor].size_bytes)
    found = [
        Consumer(sum(values), "resident", f"{len(values)} {kind} tensors")
        for kind, values in sorted(sizes.items())
    ]
    return [*found, Consumer(graph.extra_resident_bytes, "resident", "beside the graph")]
