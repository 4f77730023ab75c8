"""The tensors and scratch memory that fill the device at a plan's peak, and under any plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.budget import format_bytes
from memopt.models.device import Device
from memopt.models.graph import Graph, TensorKind
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.moved import resident_under
from memopt.programs.replay import replay


@dataclass(frozen=True, slots=True)
class Consumer:
    """A tensor, or a kernel's workspace, that takes memory at the peak.

    Attributes:
        size_bytes: its size.
        kind: "activation", "parameter", "workspace"...
        name: of the tensor, after the module whose operator writes it.
    """

    size_bytes: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The instruction with the largest memory.

    Attributes:
        where: its name, for people.
        share: its start as a share of the step's time, from 0 to 1.
        consumers: everything in memory, largest first; resident tensors as one entry per kind.
    """

    where: str
    share: float
    consumers: tuple[Consumer, ...]


def peak_of(graph: Graph, program: Program, device: Device | None = None) -> Peak | None:
    """List what is in memory at the peak; None for an empty program."""
    timeline = replay(graph, program, device)
    peak = timeline.peak_instruction
    if peak is None:
        return None
    effects = program.instructions[peak].effects(graph)
    during = [x for x in lifetimes(graph, program).device if x.begin <= peak < x.until]
    tensors = sorted(x.tensor for x in during if x.begin < peak)
    tensors += [x.tensor for x in during if x.begin == peak]
    run = dict(program.computes).get(peak)
    if run is not None:
        operator = graph.operators[run.op]
        where = owner = _named(operator.module, operator.name)
    elif peak == program.boundary:
        where, owner = "the loss", "your loss"
    else:
        where = owner = f"the return of {_tensor_name(graph, effects.begins[0])}"
    consumers = [Consumer(effects.workspace_bytes, "workspace", owner)]
    consumers += [
        Consumer(graph.tensors[t].size_bytes, str(graph.tensors[t].kind), _tensor_name(graph, t))
        for t in tensors
    ]
    consumers += _resident(graph, program)
    consumers.sort(key=lambda consumer: -consumer.size_bytes)
    share = timeline.start_s[peak] / timeline.time_s if timeline.time_s > 0 else 0.0
    return Peak(where, share, tuple(c for c in consumers if c.size_bytes > 0))


def _named(module: str, name: str) -> str:
    return f"{module}: {name}" if module else name


def _tensor_name(graph: Graph, tensor: int) -> str:
    producer = graph.producer.get(tensor)
    module = "" if producer is None else graph.operators[producer].module
    return _named(module, graph.tensors[tensor].name)


def _resident(graph: Graph, program: Program) -> list[Consumer]:
    """List resident tensors, one entry per kind, and the resident bytes outside of the graph."""
    sizes: dict[str, list[int]] = {}
    for tensor in resident_under(graph, program):
        kind = str(graph.tensors[tensor].kind)
        sizes.setdefault(kind, []).append(graph.tensors[tensor].size_bytes)
    found = [
        Consumer(sum(values), "resident", f"{len(values)} {kind} tensors")
        for kind, values in sorted(sizes.items())
    ]
    return [*found, Consumer(graph.extra_resident_bytes, "resident", "beside the graph")]


_WORDS = {
    TensorKind.PARAMETER: "parameters",
    TensorKind.BUFFER: "buffers",
    TensorKind.INPUT: "inputs",
    TensorKind.CONSTANT: "constants",
    TensorKind.OPTIMIZER_STATE: "optimizer state",
}


def fixed_bytes(
    graph: Graph,
    optimizer_parts: Iterable[tuple[str, int]] = (),
    moved: frozenset[int] = frozenset(),
) -> tuple[tuple[str, int], ...]:
    """List (what, bytes) of everything that no plan can free: resident tensors and gradients, the
    sum behind "does it fit?".

    Args:
        graph: the step.
        optimizer_parts: (what, bytes) of the optimizer state within the graph's
            `extra_resident_bytes`, to be listed by name.
        moved: resident tensors that a plan keeps on the host.
    """
    sums: dict[str, int] = {}
    for index in sorted(graph.resident - moved):
        tensor = graph.tensors[index]
        word = _WORDS[tensor.kind]
        sums[word] = sums.get(word, 0) + tensor.size_bytes
    gradients = set(graph.gradients) - graph.resident
    sums["gradients"] = sum(graph.tensors[i].size_bytes for i in gradients)
    parts = tuple(optimizer_parts)
    for what, size in parts:
        sums[what] = sums.get(what, 0) + size
    sums["other"] = graph.extra_resident_bytes - sum(size for _, size in parts)
    return tuple((what, size) for what, size in sums.items() if size > 0)


def fixed_sum(parts: tuple[tuple[str, int], ...]) -> str:
    """Write the sum as one line, small parts together."""
    total = sum(size for _, size in parts)
    large = [(what, size) for what, size in parts if size >= total / 100 and what != "other"]
    shown = [f"{what} {format_bytes(size)}" for what, size in large]
    rest = total - sum(size for _, size in large)
    if rest:
        shown.append(f"other {format_bytes(rest)}")
    return f"{' + '.join(shown)} = {format_bytes(total)}"
