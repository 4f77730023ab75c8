"""Runs planning's own backwards without the user's hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from memopt.step.backend import autocast_off
from memopt.torch_private.modes import function_of
from memopt.torch_private.modules import buffers_of, parameters_of
from memopt.torch_private.tensors import GRADIENT_HOOKS, held_once


@contextmanager
def gradient_hooks_off(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Remove the leaves' hooks inside, and restore them afterwards. Hooks added inside run."""
    leaves = [tensor for tensor in tensors if tensor.is_leaf]
    kept = [(leaf, name, getattr(leaf, name)) for leaf in leaves for name in GRADIENT_HOOKS]
    try:
        for leaf, name, hooks in kept:
            if hooks:
                setattr(leaf, name, OrderedDict())
        yield
    finally:
        for leaf, name, hooks in kept:
            if getattr(leaf, name) is not hooks:
                setattr(leaf, name, OrderedDict())  # torch goes on calling what None replaces
                setattr(leaf, name, hooks)


@contextmanager
def holding(model: nn.Module, replaced: Mapping[int, Any]) -> Iterator[None]:
    """Register in a model other tensors in the place of those with these ids."""
    found = [
        (registry, name, now)
        for module in (model.modules() if replaced else ())
        for registry in (parameters_of(module), buffers_of(module))
        for name, now in registry.items()
        if id(now) in replaced
    ]
    for registry, name, now in found:
        registry[name] = replaced[id(now)]
    try:
        yield
    finally:
        for registry, name, now in found:
            registry[name] = now


@contextmanager
def computed_as_leaves(model: nn.Module) -> Iterator[None]:
    """Register leaves with the values of the parameters that are computed
    (`torch.func.functional_call`), so that planning's backwards end there."""
    computed = [one for one in model.parameters() if not one.is_leaf]
    with holding(model, {id(one): one.detach().requires_grad_() for one in computed}):
        yield


class OwnBackward:
    """Runs backwards that give the user's leaves their gradients, and that call none of the leaves'
    hooks.

    The node that accumulates a leaf's gradient may be the user's as well (DistributedDataParallel
    holds it, or a hook on it, or a graph whose backward is still to come), or the graph may
    continue into one of the user's. Then autograd computes the gradients up to there, and this
    class accumulates them. A model with a reentrant checkpoint refuses that: there the hooks on
    such nodes do run.

    Args:
        tensors: the user's tensors, before a forward runs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]
        self._leaves = {id(tensor) for tensor in self._tensors if tensor.is_leaf}
        self._alone = {id(t) for t in self._tensors if t.is_leaf and held_once(t)}
        self._made_before = {t.grad_fn for t in self._tensors if t.grad_fn is not None}
        self._is_plain: bool | None = None
        self._reentrant = False

    def __call__(
        self, outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Run the backward of outputs, outside of autocast, from these tangents (None: ones)."""
        leaves: list[torch.Tensor] = []
        edges: list[GradientEdge] = []
        if not self._is_plain:
            leaves, edges = self._ends(outputs)
            # An empty leaf makes a detached input look computed.
            others = any(id(leaf) not in self._alone for leaf in leaves if leaf.numel())
            self._is_plain = not edges and (not others or self._reentrant)
        with autocast_off(), gradient_hooks_off(self._tensors):
            if self._is_plain:
                torch.autograd.backward(outputs, tangents)
                return
            ends: list[Any] = [*leaves, *edges]
            found = torch.autograd.grad(outputs, ends, tangents, allow_unused=True)
            for leaf, gradient in zip(leaves, found, strict=False):
                if gradient is not None and id(leaf) in self._leaves:
                    _accumulate(leaf, gradient)

    def _ends(
        self, outputs: Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[GradientEdge]]:
        """Find where a graph ends: its leaves, and edges into the user's own graphs."""
        leaves: list[torch.Tensor] = []
        edges: list[GradientEdge] = []
        seen: set[Any] = set()
        waiting: list[tuple[Any, int]] = [
            (output.grad_fn, output.output_nr) for output in outputs if output.grad_fn is not None
        ]
        while waiting:
            node, number = waiting.pop()
            if node is None:
                continue
            if node in self._made_before:
                if (node, number) not in seen:
                    seen.add((node, number))
                    edges.append(GradientEdge(node, number))
            elif node not in seen:
                seen.add(node)
                if hasattr(node, "variable"):
                    leaves.append(node.variable)
                if _is_reentrant(node):
                    self._reentrant = True
                waiting += node.next_functions
        return leaves, edges


def _accumulate(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Give a leaf a gradient as the end of a backward does."""
    with torch.no_grad():
        if leaf.grad is not None:
            leaf.grad += gradient
        elif gradient.layout is not torch.strided or gradient.stride() == leaf.stride():
            leaf.grad = gradient
        else:
            leaf.grad = torch.empty_like(leaf).copy_(gradient)


def leaves_behind(values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves of autograd that values were computed from."""
    for node in _nodes_behind(values):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf


def has_reentrant(values: Iterable[torch.Tensor]) -> bool:
    """Return whether values were computed in a reentrant checkpoint."""
    return any(map(_is_reentrant, _nodes_behind(values)))


def _is_reentrant(node: Any) -> bool:
    return function_of(node) is CheckpointFunction


def _nodes_behind(values: Iterable[torch.Tensor]) -> Iterator[Any]:
    waiting: list[Any] = [value.grad_fn for value in values]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [one for one, _ in node.next_functions]


def reaches(value: torch.Tensor, leaves: Iterable[torch.Tensor]) -> bool:
    """Return whether a backward from a value reaches one of these leaves."""
    wanted = {id(leaf) for leaf in leaves}
    return any(id(leaf) in wanted for leaf in leaves_behind([value]))
