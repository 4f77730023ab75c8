"""The bytes that a training step holds under any plan: the sum behind "does it fit?"."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.models.budget import format_bytes
from memopt.models.graph import Graph, TensorKind

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
    """List (what, bytes) of everything that no plan can free: resident tensors and gradients.

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
