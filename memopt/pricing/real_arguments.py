"""Runs one step of a captured model on its example, for arguments that kernels accept."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.step.backend import autocast_off, random_state_kept
from memopt.step.captured import Captured
from memopt.step.signature import Arguments, copied, signature


def real_arguments(captured: Captured, wanted: Collection[str]) -> dict[str, Arguments]:
    """Run one step on the example inputs, and return copies of the wanted calls' arguments.

    The model does not change: the captured graph is functional. Random state is left as it was."""
    model = captured.model()
    assert model is not None
    found: dict[str, Arguments] = {}
    values: dict[Node, Any] = {}
    primals = {primal.node: primal for primal in captured.primals}
    nodes = list(captured.module.graph.nodes)
    last = {read: node for node in nodes for read in node.all_input_nodes}
    own = [] if captured.device is None else [captured.device]
    with random_state_kept(own), torch.no_grad(), autocast_off():
        for node in nodes:
            if len(found) == len(wanted) or node.op == "output":
                break
            if node.op == "placeholder":
                primal = primals.get(node)
                values[node] = (
                    _tangent(node) if primal is None else primal.value(model, captured.call.leaves)
                )
            elif node.op == "get_attr":
                values[node] = getattr(captured.module, str(node.target))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                text = signature(node).text
                if text in wanted and text not in found:
                    found[text] = copied((args, kwargs))
                values[node] = node.target(*args, **kwargs)
            for read in {*node.all_input_nodes, node}:
                if last.get(read, node) is node:
                    values.pop(read, None)
    return found


def _tangent(node: Node) -> torch.Tensor:
    like = node.meta["val"]
    flat = torch.rand(tuple(like.shape), device=like.device).to(like.dtype)
    laid_out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return laid_out.copy_(flat)
