"""Traces `torch.autograd.grad` inside a forward: forces of an energy, residuals of a differential
equation, inner loops. The graph holds the derivative's own operators, which have derivatives."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memopt.torch_private.access import known, patched, private

_TRACED = "torch._dynamo.config.trace_autograd_ops"
_METHOD = "torch._dynamo.variables.TensorVariable.call_method"
_LEAVES = "torch._dynamo.output_graph.OutputGraph._check_requires_grad_intermediate_outputs"
_MAKERS = (
    *("empty", "full", "ones", "rand", "randn", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
    *("arange", "eye", "linspace", "tensor"),
)
"""Functions of torch's that make a leaf where they are told so."""


@contextlib.contextmanager
def gradients_traced() -> Iterator[None]:
    """Trace `torch.autograd.grad`, also for tensors that the forward makes leaves
    (`x.detach().requires_grad_()`; from torch 2.13 on).

    `Tensor.backward` stays refused: it adds to parameters' gradients, which a step would not.
    """
    private(_TRACED)
    config: Any = importlib.import_module("torch._dynamo.config")
    call = private(_METHOD)

    def called(own: Any, translator: Any, name: str, *args: Any) -> Any:
        refused = config.patch(trace_autograd_ops=False)
        with refused if name == "backward" else contextlib.nullcontext():
            return call(own, translator, name, *args)

    with config.patch(trace_autograd_ops=True), patched(_METHOD, called), _leaves_used():
        yield


@contextlib.contextmanager
def _leaves_used() -> Iterator[None]:
    """Let outputs depend on leaves that the forward makes, unless they are such a leaf themselves,
    whose gradient a user could read."""
    if not known(_LEAVES):
        yield
        return
    check = private(_LEAVES)
    tensor = private("torch._dynamo.variables.TensorVariable")

    def checked(graph: Any, returned: Any, translator: Any) -> None:
        made = [v for v in graph.leaf_var_creation_order if isinstance(v, tensor) and not v.source]
        nodes = {one.as_proxy().node for one in made}
        outputs = [one for one in returned if isinstance(one, tensor)]
        if any(one.as_proxy().node in nodes for one in outputs):
            check(graph, returned, translator)

    with patched(_LEAVES, checked):
        yield


def makers_of_leaves(handlers: Mapping[Any, Any]) -> dict[Any, Callable[..., Any]]:
    """Return handlers by which Dynamo traces `torch.zeros(..., requires_grad=True)` in a forward as
    `torch.zeros(...).requires_grad_()`, given its own; none where it traces no such leaves.

    It refuses the first, which the second is, bit for bit.
    """
    makers = [getattr(torch, name) for name in _MAKERS] if known(_LEAVES) else []
    return {one: _making(handlers.get(one)) for one in makers}


def _making(other: Callable[..., Any] | None) -> Callable[..., Any]:
    def made(variable: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("requires_grad")
        if asked is None or asked.as_python_constant() is not True:
            return other and other(variable, translator, *args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "requires_grad"}
        tensor = variable.call_function(translator, list(args), rest)
        return tensor.call_method(translator, "requires_grad_", [], {})

    return made
