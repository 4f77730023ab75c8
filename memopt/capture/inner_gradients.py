"""Refuses derivatives in a forward (`torch.autograd.grad`) that a trace would not follow."""

from __future__ import annotations

from itertools import chain

import torch
from torch.fx import GraphModule, Node

from memopt.capture.uncaptured import line_of
from memopt.errors import CaptureError
from memopt.step.functions import has_no_second_derivative
from memopt.step.operators import Substitute

_AUTOCAST = "_enter_autocast"
_PACKET = type(torch.ops.aten.mm)
_NAMES = {
    "autograd_function_apply": "a custom autograd function",
    "tag_activation_checkpoint": "a checkpoint",
}


def check_inner_gradients(traced: GraphModule) -> None:
    """Refuse `torch.autograd.grad` beside calls whose derivatives a trace takes for constants
    (custom functions, checkpoints), and beside autocast, whose casts in it are not eager's.

    Raises:
        CaptureError: there is such a one, named.
    """
    graphs = [one.graph for one in traced.modules() if isinstance(one, GraphModule)]
    nodes = list(chain.from_iterable(one.nodes for one in graphs))
    if not any(node.target is torch.autograd.grad for node in nodes):
        return
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")) or any(map(_casts, nodes)):
        raise CaptureError(
            "the forward calls torch.autograd.grad and runs under autocast, whose casts no trace "
            "repeats in such a derivative: run the model without autocast, or plan the sub-modules "
            "that it calls"
        )
    for node in nodes:
        if (node.op == "call_function" and _is_custom(node.target)) or has_no_second_derivative(
            node
        ):
            name = getattr(node.target, "__name__", node.target)
            raise CaptureError(
                f"the forward calls torch.autograd.grad beside {_NAMES.get(name, name)}"
                f"{line_of(node)}, whose derivative a trace does not differentiate: write that "
                "with other operators of torch's, or plan the sub-modules that it calls"
            )


def _casts(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == _AUTOCAST and node.args[2:3] != (False,)


def _is_custom(target: object) -> bool:
    """Return whether a target is no function or operator of torch's own; custom autograd functions
    are of the namespace `higher_order`."""
    if isinstance(target, Substitute):
        return True
    namespace = str(target) if isinstance(target, _PACKET) else getattr(target, "namespace", "aten")
    return str(namespace).partition(".")[0] not in ("aten", "prims")
