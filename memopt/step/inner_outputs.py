"""Outputs of a traced model from which other outputs are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from memopt.step.nodes import ancestors


def inner_outputs(leaves: Sequence[Any]) -> dict[int, frozenset[int]]:
    """Return the positions of differentiable leaves of an output from which others are computed →
    those others'.

    Of results of one function, a nested graph say, nothing is known: each counts as computed from
    the others.
    """
    made = {i: leaf for i, leaf in enumerate(leaves) if _is_differentiable(leaf)}
    sources = {i: ancestors(leaf) for i, leaf in made.items()}
    computed = {
        i: frozenset(
            j for j, other in made.items() if other is not leaf and _maker(leaf) in sources[j]
        )
        for i, leaf in made.items()
    }
    return {i: others for i, others in computed.items() if others}


def _is_differentiable(leaf: Any) -> bool:
    value = leaf.meta.get("example_value") if isinstance(leaf, Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad and leaf.op != "placeholder"


def _maker(node: Node) -> Node:
    """Return the function that a node is a result of."""
    several = node.args[0] if node.op == "call_function" and node.args else None
    value = several.meta.get("example_value") if isinstance(several, Node) else None
    return several if isinstance(several, Node) and isinstance(value, (tuple, list)) else node
