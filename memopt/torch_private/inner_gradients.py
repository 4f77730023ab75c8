"""Traces `torch.autograd.grad` inside a forward: forces of an energy, residuals of a differential
equation, inner loops. The graph holds the derivative's own operators, which have derivatives."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from memopt.torch_private.access import known, patched, private

_TRACED = "torch._dynamo.config.trace_autograd_ops"
_BACKWARD = "torch._dynamo.variables.TensorVariable.method_backward"
_LEAVES = "torch._dynamo.output_graph.OutputGraph._check_requires_grad_intermediate_outputs"


@contextlib.contextmanager
def gradients_traced() -> Iterator[None]:
    """Trace `torch.autograd.grad`, also for tensors that the forward makes leaves
    (`x.detach().requires_grad_()`; from torch 2.13 on).

    `Tensor.backward` stays refused: it adds to parameters' gradients, which a step would not.
    """
    private(_TRACED)
    config: Any = importlib.import_module("torch._dynamo.config")
    backward = private(_BACKWARD)

    def refused(*args: Any, **kwargs: Any) -> Any:
        with config.patch(trace_autograd_ops=False):
            return backward(*args, **kwargs)

    with config.patch(trace_autograd_ops=True), patched(_BACKWARD, refused), _leaves_used():
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
