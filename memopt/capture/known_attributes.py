"""What a trace is told of attributes of classes and tensors, and which it sets on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from memopt.errors import CaptureError
from memopt.torch_private.access import known, patched, private
from memopt.torch_private.dynamo import constant

AttributesSet: TypeAlias = list[tuple[Node, str]]
"""(node of a tensor in Dynamo's graph, name)."""
_GET = "torch._dynamo.variables.builtin.GetAttrBuiltinVariable._call_getattr"
_LOAD = "torch._dynamo.symbolic_convert.generic_getattr"
_SET = "torch._dynamo.variables.builtin.SetAttrBuiltinVariable._call_setattr"
_SET_BEFORE = "torch._dynamo.variables.builtin.BuiltinVariable.call_setattr"
_HANDLERS = "torch._dynamo.variables.builtin.BuiltinVariable.call_function_handler_cache"
"""Where torch 2.11 keeps handlers, `_SET_BEFORE` among them, from one trace to the next."""
_NAMES = ("__module__", "__name__", "__qualname__")


@contextlib.contextmanager
def known_attributes() -> Iterator[AttributesSet]:
    """Trace inside with these answers, where this torch can be given them.

    Yields:
        The attributes that the forward sets on tensors; filled while tracing.
    """
    found: AttributesSet = []
    setting = _SET if known(_SET) else _SET_BEFORE
    change = private(setting)
    get = private(_GET) if known(_GET) else None
    load = private(_LOAD) if known(_LOAD) else None

    def asked(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        assert get is not None
        name = args[1].is_python_constant() and args[1].as_python_constant()
        return _name_of_class(args[0], name) or get(self, tx, args, kwargs)

    def loaded(tx: Any, of: Any, name: str, *default: Any) -> Any:
        assert load is not None
        return _name_of_class(of, name) or load(tx, of, name, *default)

    def changed(self: Any, tx: Any, of: Any, name: Any, value: Any) -> Any:
        if of.is_tensor() and name.is_python_constant():
            found.append((of.as_proxy().node, name.as_python_constant()))
        if of.is_tensor() and name.is_python_constant() and value.is_python_constant():
            is_asked = name.as_python_constant() == "requires_grad"
            before = of.as_proxy().node.meta["example_value"].requires_grad
            if is_asked and before is value.as_python_constant():
                return value
        return change(self, tx, of, name, value)

    with contextlib.ExitStack() as stack:
        if known(_HANDLERS):
            stack.enter_context(patched(_HANDLERS, {}))
        stack.enter_context(patched(setting, changed))
        if get is not None:
            stack.enter_context(patched(_GET, asked))
        if load is not None:
            stack.enter_context(patched(_LOAD, loaded))
        yield found


def check_attributes_set(traced: GraphModule, found: AttributesSet) -> None:
    """Refuse attributes that a forward sets on a tensor which it makes and returns: a planned step
    returns another one.

    Raises:
        CaptureError: there are some.
    """
    returned = {node.name for node in traced.graph.output_node().all_input_nodes}
    for node, name in found:
        plain = hasattr(torch.Tensor, name) or node.op == "placeholder"
        if node.name in returned and not plain:
            raise CaptureError(
                f"the forward sets .{name} on a tensor that it returns, which a planned step does "
                f"not: return what it sets beside the tensor, or keep it (self.{name} = ...)"
            )


def _name_of_class(of: Any, name: object) -> Any:
    """Return the constant that is a class's name; None: it is something else that is asked for."""
    if name in _NAMES and of.is_python_constant():
        owner = of.as_python_constant()
        if isinstance(owner, type):
            return constant(getattr(owner, str(name)))
    return None
