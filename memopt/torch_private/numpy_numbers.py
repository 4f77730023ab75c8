"""Numbers that a forward computes in NumPy, which Dynamo takes for tensors.

`np.sqrt(2)` is a number: in eager it leaves the dtype of the tensor that it multiplies as it is. A
tensor of float64 without dimensions changes that of others without dimensions, and of integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from memopt.torch_private.access import patched, private
from memopt.torch_private.dynamo import handlers, handlers_replaced, variables, visit
from memopt.torch_private.pytree import tree_leaves

_CALL = "torch._dynamo.variables.NumpyVariable.call_function"
_WRAP = "torch._dynamo.variables.builder.VariableBuilder._wrap"
_EQUAL = "torch._dynamo.guards.GuardBuilder.EQUALS_MATCH"
_COMPUTING = (
    "numpy_to_tensor_wrapper",
    "numpy_attr_wrapper",
    "numpy_method_wrapper",
    "numpy_operator_wrapper",
)
_WIDE = (torch.float64, torch.int64, torch.bool, torch.complex128)
_SCALARS = {torch.int64: 1, torch.int32: 1, torch.bool: True, torch.complex128: 1j}
"""Numbers of Python's in the place of NumPy's; others are 1.0."""
_SMALL = 2**31
"""What a product of two is below still has 64 bits."""
T = TypeVar("T")


def with_numbers(trace: Callable[[], tuple[Any, T]]) -> tuple[Any, T]:
    """Run `trace`, which returns Dynamo's graph first, with the numbers that NumPy computes of
    numbers as Python's: for an operator of torch they are the same. Not where they may differ:
    beside arrays of NumPy of less than 64 bits, and as data of a new tensor."""
    import numpy

    call, made, differing = private(_CALL), list[Any](), list[Any]()
    wrap, equal = private(_WRAP), private(_EQUAL)

    def computed(function: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        def whole() -> Any:
            return call(function, translator, args, kwargs)

        try:
            number = _number(function.value, args, kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return whole()  # torch says what is wrong
        if number is None:
            return whole()
        made.append(number)
        return _variable()(number, whole)

    def read(builder: Any, value: Any) -> Any:
        kind = type(value)
        exact = kind is numpy.float64 and value == value
        if not exact and not (kind is numpy.int64 and abs(value) < _SMALL):
            return wrap(builder, value)
        guards = builder.install_guards(equal)
        made.append(value)
        return _variable()(value, lambda: wrap(builder, value), **guards)

    def heard(usual: Any) -> Any:
        def handler(function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
            floats = list(filter(_is_float, args))
            visit(lambda one: floats.append(one) if _is_float(one) else None, args)
            if made and "dtype" not in kwargs:
                differing.extend(floats)
            return usual and usual(function, translator, *args, **kwargs)

        return handler

    usual = handlers()
    of_data = {one: heard(usual.get(one)) for one in (torch.tensor, torch.as_tensor, torch.asarray)}
    with handlers_replaced(of_data), patched(_CALL, computed), patched(_WRAP, read):
        found = trace()
    if made:
        values = _made_in_numpy(found[0].graph).values()
        differing += [one for one in values if one is not None and one.dtype not in _WIDE]
    return trace() if differing else found


def _is_float(variable: Any) -> bool:
    return isinstance(getattr(variable.realize(), "value", None), float)


def _number(function: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function of NumPy's returns, if that is a number of 64 bits, or a truth value,
    and computed from numbers alone; else None."""
    import numpy

    home = getattr(function, "__module__", None)
    if not isinstance(function, numpy.ufunc) and home not in ("numpy", "numpy.linalg"):
        return None
    result = function(*map(_plain, args), **{name: _plain(one) for name, one in kwargs.items()})
    return result if isinstance(result, (numpy.float64, numpy.int64, numpy.bool_)) else None


def _plain(variable: Any) -> Any:
    """Return the number, or the list of numbers, that one of Dynamo's variables is.

    Raises:
        TypeError: it is something else.
    """
    known = variable.realize()
    constants, lists = variables("constant.ConstantVariable", "lists.BaseListVariable")
    if isinstance(known, constants) and isinstance(known.value, (int, float, type(None))):
        return known.value
    if isinstance(known, lists):
        return [_plain(one) for one in known.items]
    raise TypeError


@functools.cache
def _variable() -> Any:
    """Make the class of Dynamo's variables for numbers of NumPy's."""
    (constant,) = variables("constant.ConstantVariable")

    class NumPyNumber(constant):  # type: ignore[misc, valid-type]
        """A number that is a NumPy array where it is asked for what Python's numbers lack."""

        def __init__(self, value: Any, whole: Callable[[], Any], **kwargs: Any) -> None:
            super().__init__(value.item(), **kwargs)
            self._whole, self._kind = whole, type(value)

        def python_type(self) -> type:
            """Return NumPy's class of the number."""
            return self._kind

        def var_getattr(self, translator: Any, name: str) -> Any:
            """Return Dynamo's variable of an attribute."""
            if hasattr(self.value, name):
                return super().var_getattr(translator, name)
            return self._whole().var_getattr(translator, name)

        def call_method(self, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
            """Return Dynamo's variable of a method's result."""
            if name in ("item", "tolist"):
                return constant(self.value)
            if hasattr(self.value, name):
                return super().call_method(translator, name, args, kwargs)
            return self._whole().call_method(translator, name, args, kwargs)

    return NumPyNumber


def _made_in_numpy(graph: Graph) -> dict[Node, torch.Tensor | None]:
    """Return the nodes that compute in NumPy, with their values."""
    kinds = [private(f"torch._dynamo.utils.{name}") for name in _COMPUTING]
    calls = [one for one in graph.nodes if one.op == "call_function"]
    made = [one for one in calls if one.target in kinds or type(one.target) in kinds]
    return {one: _value(one) for one in made}


def _value(node: Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def taken_for_tensors(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of Dynamo's graph that compute with a number of NumPy's, taken for a tensor,
    in another dtype than eager's."""
    made = _made_in_numpy(graph)
    for node in graph.nodes if made else ():
        given = [one for one in tree_leaves(node.args) if isinstance(one, Node)]
        numbers = [made[one] for one in given if one in made]
        others = [v for one in given if one not in made and (v := _value(one)) is not None]
        if node.op != "call_function" or node in made or not others:
            continue
        if any(v is not None and v.dim() == 0 and _changes(others, v.dtype) for v in numbers):
            yield node


def _changes(tensors: list[torch.Tensor], number: torch.dtype) -> bool:
    """Return whether a number gives the result of some tensors another dtype as a tensor."""
    results, given = list[torch.dtype](), torch.empty((), dtype=number, device="meta")
    for scalar in (given, _SCALARS.get(number, 1.0)):
        other: Any = scalar
        for whole in (False, True):
            for dtype in {one.dtype for one in tensors if (one.dim() > 0) == whole}:
                alike = torch.empty((1,) * whole, dtype=dtype, device="meta")
                found = torch.result_type(alike, other)
                other = torch.empty((), dtype=found, device="meta")
        results.append(other.dtype)
    return results[0] != results[1]
