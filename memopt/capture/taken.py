"""Refuses arguments and tensors of a model that no planned step can take."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional

from memopt.capture.uncaptured import line_of
from memopt.capture.underived import refused_in
from memopt.errors import CaptureError
from memopt.step.inputs import Call, named_tensors
from memopt.step.objects import attributes, opened
from memopt.torch_private import pytree
from memopt.torch_private.tensors import base_of, disabled_torch_function
from memopt.user_code.restored_state import forward_restored

_TAKEN = (torch.Tensor, str, int, float, bool, type(None))
_PARTS = (
    "hand the model its parts as tensors of their own (indices and values with clone(), summed by "
    "index_add) or plan the sub-modules that take dense tensors"
)
_SPARSE_AT: dict[object, int] = {functional.embedding: 6, functional.embedding_bag: 7}
"""Positions of the argument `sparse`."""


def check_leaves(call: Call) -> None:
    """Refuse arguments other than tensors, numbers, strings or None.

    Raises:
        CaptureError: there is one, named.
    """
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor) and _takes_part(type(leaf)):
            raise CaptureError(
                f"the model is called with a {type(leaf).__name__}, which takes part in every "
                "operation by a __torch_function__ of its own, and would not in a planned step: "
                "pass the plain tensor (as_subclass(torch.Tensor))"
            )
        if not isinstance(leaf, _TAKEN):
            raise CaptureError(
                f"the model is called with {_place(call, leaf)}; memopt takes tensors, numbers, "
                "strings, None, and containers, dataclasses and objects of classes written in "
                "Python (argparse.Namespace, not types.SimpleNamespace) that hold them. Let the "
                "forward take what it reads of other objects (x and edge_index for a graph's "
                "Data), or keep these as attributes of the model"
            )


def is_taken(leaf: Any) -> bool:
    """Return whether `check_leaves` takes a flat argument."""
    return isinstance(leaf, _TAKEN) and not _takes_part(type(leaf))


def _takes_part(kind: type) -> bool:
    """Return whether a tensor class has a `__torch_function__` that a user has written."""
    for one in kind.__mro__:
        if one is torch.Tensor:
            return False
        own = one.__dict__.get("__torch_function__")
        if own is not None:
            return not one.__module__.startswith("torch.") and own is not disabled_torch_function
    return False


def check_taken(model: nn.Module, call: Call) -> None:
    """Refuse what `check_leaves` refuses, and sparse or nested tensors among the arguments,
    parameters and buffers.

    Raises:
        CaptureError: there is one, named.
    """
    check_leaves(call)
    for leaf in call.tensors():
        if leaf.layout is not torch.strided:
            raise CaptureError(_not_dense(f"argument {_argument(model, call, leaf)!r}", leaf))
        if base_of(leaf) is not None and base_of(leaf).layout is not torch.strided:
            raise CaptureError(
                f"argument {_argument(model, call, leaf)!r} is a part of a sparse or nested "
                "tensor, of which no graph can be made: pass a copy of it (clone())"
            )
    for name, tensor in named_tensors(model):
        if tensor.layout is not torch.strided:
            raise CaptureError(_not_dense(f"the parameter or buffer {name!r}", tensor))


def check_dense(traced: GraphModule, sources: dict[int, str]) -> None:
    """Refuse sparse and nested tensors that the forward makes, or reads from elsewhere, and
    embeddings whose gradients are sparse.

    Args:
        traced: dynamo's graph.
        sources: id of a tensor that the model does not register → where it is read.

    Raises:
        CaptureError: there is one, named.
    """
    for _, tensor in (*traced.named_buffers(), *traced.named_parameters()):
        if tensor.layout is not torch.strided:
            raise CaptureError(_not_dense(sources.get(id(tensor), "a tensor"), tensor))
    for node in traced.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(_not_dense(f"what the forward makes{line_of(node)}", value))
        if _has_sparse_gradient(node):
            raise refused_in(
                node,
                f"the gradient of an embedding{line_of(node)} is a sparse tensor, which memopt "
                "cannot plan; make it with sparse=False (nn.Embedding(..., sparse=False))",
            )


def _has_sparse_gradient(node: Node) -> bool:
    """Return whether a node of dynamo's graph looks up a trained matrix with sparse=True."""
    at = _SPARSE_AT.get(node.target)
    if at is None or not (node.args[at] if len(node.args) > at else node.kwargs.get("sparse")):
        return False
    weight = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
    value = weight.meta.get("example_value") if isinstance(weight, Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


def check_objects_kept(model: nn.Module, call: Call) -> None:
    """Refuse a forward that changes objects among its arguments: a planned step gets other objects
    with the same attributes. Runs the forward once, on objects of its own.

    Raises:
        CaptureError: it changes one; the object and the attribute are named.
    """
    if not call.objects:
        return
    own = call.with_tensors(lambda tensor: tensor)
    before = [(one, _parts(one)) for one in own.objects]
    with forward_restored(model, own):
        # An object's inner objects come after it.
        for one, old in reversed(before):
            new = _parts(one)
            changed = [n for n in {**old, **new} if old.get(n) != new.get(n)]
            if changed:
                raise CaptureError(
                    f"the forward changes {changed[0]!r} of the {type(one).__name__} that it is "
                    "called with, which a planned step would leave as it is: return it as an "
                    "output, or set it before the call"
                )


def _parts(one: Any) -> dict[str, tuple[Any, ...]]:
    """Return the structure of each attribute of an object, and the ids of its leaves."""
    found = {}
    for name, value in attributes(one).items():
        leaves, spec = pytree.tree_flatten(opened(value))
        found[name] = spec, tuple(map(id, leaves))
    return found


def _not_dense(what: str, tensor: torch.Tensor) -> str:
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return (
            f"{what} is a nested tensor ({layout}), which memopt cannot plan: pad it "
            "(torch.nested.to_padded_tensor) and mask what is padding"
        )
    return (
        f"{what} is a sparse tensor ({layout}), which memopt cannot plan: make it dense "
        f"(to_dense()), {_PARTS}"
    )


def _place(call: Call, leaf: Any) -> str:
    """Return a text on what a leaf is, and of which object an attribute."""
    kind = type(leaf).__name__
    for one in call.objects:
        for name, value in attributes(one).items():
            if value is leaf:
                return f"a {type(one).__name__} whose {name!r} is a {kind}"
    return f"a {kind}"


def _argument(model: nn.Module, call: Call, leaf: torch.Tensor) -> str:
    """Return the name of the argument that a tensor is, or is in."""
    args, kwargs = call.opened
    named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    for name, value in named.items():
        if any(one is leaf for one in pytree.tree_leaves(value)):
            return name
    raise AssertionError("the tensor is none of the call's")
