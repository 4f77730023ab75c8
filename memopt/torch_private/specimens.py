"""Instances of torch's classes, in which to look for attributes that classes lack."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any


def optimizer_after_a_step() -> Any:
    """Make an optimizer under a learning-rate scheduler that has made a step."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros((), device="cpu"))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    del scheduler
    return optimizer


def gradient_scaler() -> Any:
    """Make a gradient scaler of the CPU."""
    import torch

    return torch.amp.GradScaler("cpu")


def overload() -> Any:
    """Return an operator's overload."""
    import torch

    return torch.ops.aten.add.Tensor


def functions_node() -> Any:
    """Return the class of the node that autograd makes of a `torch.autograd.Function`."""
    import torch

    class Itself(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

    with torch.enable_grad():
        made: Any = Itself.apply(torch.ones((), requires_grad=True, device="cpu"))  # type: ignore[no-untyped-call]
    return type(made.grad_fn)


def accumulating_node() -> Any:
    """Return the node of autograd's that accumulates a leaf's gradient."""
    import torch

    leaf = torch.ones((), requires_grad=True, device="cpu")
    return torch.autograd.graph.get_gradient_edge(leaf).node


def compiled_function() -> Any:
    """Collect the names in AOTAutograd's `CompiledFunction`, a class inside of a function."""
    from torch._functorch._aot_autograd import runtime_wrappers

    found = types.SimpleNamespace()
    functions = [one for one in vars(runtime_wrappers).values() if isinstance(one, type)]
    for kind in functions:
        for function in vars(kind).values():
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            for one in _inside(code):
                if one.co_name == "CompiledFunction":
                    vars(found).update(dict.fromkeys(one.co_names))
    return found


def boxed_function() -> Any:
    """Make a function that AOTAutograd calls with a list of its arguments."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(lambda: None)


def first_call() -> Any:
    """Make the object by which AOTAutograd tells a function's first call from later ones."""
    from torch._functorch._aot_autograd import runtime_wrappers

    return runtime_wrappers._FirstInvocationContext()


def constant_function() -> Any:
    """Make a function whose result is a constant in a trace."""
    import torch

    mark: Any = torch._dynamo.assume_constant_result
    return mark(lambda: None)


def traced_frame() -> Any:
    """Return the frame that an export by dynamo traces around a model."""
    import torch
    from torch._dynamo.functional_export import ModuleToTrace

    return ModuleToTrace(torch.nn.Identity(), None)


def _inside(code: Any) -> Iterator[types.CodeType]:
    if isinstance(code, types.CodeType):
        yield code
        for one in code.co_consts:
            yield from _inside(one)


def empty_graph() -> Any:
    """Make an FX graph without nodes."""
    import torch.fx

    return torch.fx.Graph()
