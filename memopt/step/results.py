"""The tensors that a step's results hold: outputs, gradients, new values of buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from memopt.models.graph import Operator, Phase, Tensor
from memopt.step.captured import Captured


def held_by(
    nodes: Iterable[Any], storages: Mapping[Node, tuple[int | None, ...]]
) -> tuple[int, ...]:
    """Return the indices of the tensors that nodes among these values hold, each once."""
    held = (t for node in nodes if isinstance(node, Node) for t in storages[node])
    return tuple(dict.fromkeys(t for t in held if t is not None))


def written_back(
    captured: Captured,
    storages: Mapping[Node, tuple[int | None, ...]],
    tensors: Sequence[Tensor],
    operators: Iterable[Operator],
) -> tuple[int, ...]:
    """Return the outputs that hold nothing but new values of buffers and inputs, which AOTAutograd
    copies there and drops when the forward is over, and that nothing reads: what runs again after
    it could not. A forward without a backward drops them, too, but at its very end."""
    if not any(one.phase is Phase.BACKWARD for one in operators):
        return ()
    count = len(captured.mutated)
    needed = {*held_by(captured.forward_outputs[count:], storages)}
    needed |= {*held_by(captured.gradients, storages)}
    needed |= {t for one in operators for t in one.reads}
    found = held_by(captured.forward_outputs[:count], storages)
    return tuple(t for t in found if t not in needed and not tensors[t].resident)


def input_gradients(
    captured: Captured, storages: Mapping[Node, tuple[int | None, ...]]
) -> tuple[int, ...]:
    """Return the gradients of inputs, if none of them shares memory with a parameter's."""
    pairs = list(zip(captured.primals, captured.gradients, strict=True))
    found = held_by((gradient for primal, gradient in pairs if not primal.held), storages)
    others = held_by((gradient for primal, gradient in pairs if primal.held), storages)
    return found if set(found).isdisjoint(others) else ()
