"""Branches and checks of tensors' values in a trace: Dynamo refuses branches, unless it is told how
they go, and makes of checks operators that nothing reads. Of numbers of tensors (`item()`) it makes
symbols, unless it is told which they are."""

from __future__ import annotations

import contextlib
import dis
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.distributions.constraints import is_dependent
from torch.fx import GraphModule, Node

from memopt.torch_private import pytree
from memopt.torch_private.access import known, patched, private
from memopt.torch_private.dynamo import constant, handlers, handlers_replaced, taken_whole
from memopt.torch_private.instructions import (
    JUMPS,
    KEEPS,
    instructions_replaced,
    past_error,
    place_of,
)
from memopt.torch_private.modes import TorchDispatchMode
from memopt.torch_private.numbers_of_tensors import computed_by, items_of
from memopt.torch_private.selections import Selections
from memopt.torch_private.values_met import KnownValue, KnownValues, Met
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_TENSOR, _TUPLE = (f"torch._dynamo.variables.{one}Variable" for one in ("Tensor", "Tuple"))
_NESTED = (_TUPLE, "torch._dynamo.variables.ListVariable")
_SIZED = {
    *("expand", "new_full", "new_ones", "new_zeros", "repeat"),
    *("reshape", "split", "tile", "view"),
}
"""Methods of tensors whose first arguments are sizes."""
_FUNCTION = "torch._dynamo.variables.UserFunctionVariable"
_NUMBER = "torch._dynamo.variables.SymNodeVariable"
_CALL = f"{_TENSOR}.call_method"
_SET = f"{_TENSOR}.mp_ass_subscript_impl"
"""What sets elements of tensors without a call of a method, since torch 2.14."""
_BUILD = "torch._dynamo.variables.base.VariableTracker.build"
_BUILTIN = "torch._dynamo.variables.BuiltinVariable.call_function"
_WRAPPED = "torch._C._functorch.is_functorch_wrapped_tensor"
_READ = "torch.ops.aten._local_scalar_dense.default"
_ASSERTS = ("torch.ops.aten._assert_async.default", "torch.ops.aten._assert_async.msg")
_CHECKS = {
    "torch._assert": 0,
    "torch._assert_async": 0,
    "torch._check_tensor_all": 0,
    "torch._check_tensor_all_with": 1,
}
"""Functions that raise where a tensor is not true, and which argument it is."""
_OF_NUMBERS = {math.isfinite: "isfinite", math.isinf: "isinf", math.isnan: "isnan"}
_COMPUTED = (math.cos, math.exp, math.log, math.log10, math.log2, math.pow, math.sin, math.tanh)
_CASTS = ("sym_float", "sym_int")


@dataclass
class _Branches:
    answers: KnownValues
    in_python: Any = None
    met: list[Met] = field(default_factory=list)
    tensor: Any = field(default_factory=lambda: private(_TENSOR))
    number: Any = field(default_factory=lambda: private(_NUMBER))
    numbers: dict[Node, Any] = field(default_factory=dict)
    nested: tuple[Any, ...] = field(default_factory=lambda: tuple(map(private, _NESTED)))
    thread: int = field(default_factory=threading.get_ident)

    def __post_init__(self) -> None:
        self.selections = Selections(self.count, self.in_whole, partial(self.truth, goes=True))

    def begin(self) -> None:
        """Forget what an earlier trace has met."""
        self.met.clear()
        self.numbers.clear()
        self.selections.open.clear()
        self.answers.begin()

    def in_whole(self, translator: Any, value: Any) -> bool:
        """Return whether a variable is a tensor of this thread's outermost graph: not of a nested
        graph, nor of a transform (`torch.func.grad`)."""
        output = translator.output
        if not isinstance(value, self.tensor) or output.current_tracer is not output.root_tracer:
            return False
        made = value.as_proxy().node.meta.get("example_value")
        here = threading.get_ident() == self.thread
        return here and isinstance(made, torch.Tensor) and not private(_WRAPPED)(made)

    def add(self, translator: Any, value: Any, how: str, goes: bool, **more: Any) -> None:
        """Add what a method makes of a tensor, which nothing else has."""
        own = value.call_method(translator, how, [], {})
        self.met.append(Met((own,), own.as_proxy().node, goes, **more))

    def jump(self, usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        value = self.asked(translator)
        if value is not None:
            goes = past_error(translator, instruction)
            self.settle(translator, value, goes, goes is not None)
        return usual(translator, instruction)

    def keep(self, usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        value, stack = self.asked(translator), translator.stack
        if value is None or not self.settle(translator, value, None, False):
            return usual(translator, instruction)
        truth = stack[-1]
        found = usual(translator, instruction)
        if stack and stack[-1] is truth:
            stack[-1] = value
        return found

    def negate(self, usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        value = self.asked(translator)
        if value is not None:
            self.settle(translator, value, None, False)
        return usual(translator, instruction)

    def asked(self, translator: Any) -> Any:
        """Return the tensor or number whose truth an instruction asks for; None: it is of something
        else."""
        value = translator.stack[-1]
        return value if self.is_known(translator, value) else None

    def is_known(self, translator: Any, value: Any) -> bool:
        """Return whether a variable is a tensor of the graph itself, or computed from numbers in
        such alone."""
        if isinstance(value, self.number):
            items = items_of(value.as_proxy().node)
            return bool(items) and all(item in self.numbers for item in items)
        return self.in_whole(translator, value)

    def settle(self, translator: Any, value: Any, goes: bool | None, raises: bool) -> bool:
        """Replace the value of which is asked by its truth, if that is known; return whether."""
        truth = self.truth(translator, value, goes, raises)
        if truth is not None:
            translator.stack[-1] = constant(truth)
        return truth is not None

    def truth(
        self, translator: Any, value: Any, goes: bool | None = None, raises: bool = False
    ) -> bool | None:
        """Return the truth of a tensor or number, and add it to what was met; None: not known."""
        node = value.as_proxy().node
        asked = goes is None
        answer = self.answers.truth(node, place_of(translator)) if asked else KnownValue(goes)
        if answer is None:
            return None
        if answer.compute is not None:
            self.met.append(Met((), node, answer.value, raises, compute=answer.compute))
        elif isinstance(value, self.number):
            items = items_of(node)
            tensors = tuple(self.numbers[item] for item in items)
            self.met.append(Met(tensors, node, answer.value, raises, computed_by(node, items)))
        else:
            self.add(translator, value, "clone", answer.value, raises=raises)
        return bool(answer.value)

    def call(self, usual: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer with the number that is read out of a tensor, if it is known. Else keep the value
        of the tensor."""
        translator, name = args[:2] if len(args) > 1 else (None, "")
        if not isinstance(name, str) or not self.in_whole(translator, variable):
            return usual(variable, *args, **kwargs)
        if name in _SIZED and len(args) > 2:
            args = (*args[:2], [self.size(translator, one) for one in args[2]], *args[3:])
        if name not in ("item", "tolist"):
            found = self.selections.method(translator, variable, name, *args[2:4])
            return usual(variable, *args, **kwargs) if found is None else found
        answer = self.read(translator, variable, name == "tolist")
        if answer is not None:
            return private(_BUILD)(translator, _listed(answer.value))
        found = usual(variable, *args, **kwargs)
        if isinstance(found, self.number):
            kept = variable.call_method(translator, "clone", [], {})
            self.numbers[found.as_proxy().node] = kept
        return found

    def size(self, translator: Any, given: Any) -> Any:
        """Return a size that a method is given, or several, with numbers in place of tensors."""
        one = given.realize()
        if isinstance(one, self.nested):
            return type(one)([self.size(translator, item) for item in one.items])
        if not self.in_whole(translator, one):
            return given
        made = one.as_proxy().node.meta["example_value"]
        if made.dim() or made.is_floating_point():
            return given
        return one.call_method(translator, "item", [], {})

    def read(
        self, translator: Any, variable: Any, nested: bool, state: Mapping[str, Any] | None = None
    ) -> KnownValue | None:
        """Return the number in a tensor, or all of them, and add it to what was met; None: it is
        not known. `state` is as of `KnownValues.number`."""
        node, place = variable.as_proxy().node, place_of(translator)
        answer = self.answers.number(node, place, nested, state)
        if answer is None:
            return None
        if answer.compute is not None:
            more: Any = {"compute": answer.compute, "truth": False, "place": place}
            self.met.append(Met((), node, answer.value, **more))
        elif isinstance(answer.value, bool):
            self.add(translator, variable, "clone", answer.value)
        else:
            same = variable.call_method(translator, "eq", [constant(answer.value)], {})
            self.add(translator, same, "all", True, number=answer.value)
        return answer

    def count(self, translator: Any, variable: Any, how: str) -> int | None:
        """Return a number that a method computes of a tensor, and add it to what was met; None: it
        is not known."""
        number = variable.call_method(translator, how, [], {})
        answer = self.read(translator, number, True, translator.output.nn_modules)
        if answer is None:
            self.selections.open[number.as_proxy().node.name] = variable.as_proxy().node.name
        return None if answer is None else int(answer.value)

    def setting(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return what sets elements of a tensor, at positions in place of masks."""

        def set_elements(variable: Any, translator: Any, key: Any, value: Any) -> Any:
            given = [] if value is None else [key, value]
            found = given and self.selections.method(translator, variable, "__setitem__", given, {})
            return found or usual(variable, translator, key, value)

        return set_elements

    def builtin(self, usual: Any, function: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        """Answer what `int(x)` and `float(x)` are, if it is known, format the numbers of tensors
        that hold one, and index by positions."""
        given = args[0].realize() if len(args) == 1 and not kwargs else None
        kind = getattr(function, "fn", None)
        if kind in (int, float) and given is not None and self.in_whole(translator, given):
            args = [given.call_method(translator, "item", [], {})]
        if kind is str.format:
            args = [self.shown(translator, one.realize()) for one in args]
        if kind is operator.getitem:
            index = self.selections.item(translator, *(one.realize() for one in args))
            args = args if index is None else [args[0], index]
        return usual(function, translator, args, kwargs)

    def shown(self, translator: Any, value: Any) -> Any:
        """Return what is formatted in place of a value."""
        ours = self.in_whole(translator, value)
        if not ours or value.as_proxy().node.meta["example_value"].dim():
            return value
        return value.call_method(translator, "item", [], {})

    def of_number(self, usual: Any, name: str, function: Any, translator: Any, *args: Any) -> Any:
        """Stand for a function that looks whether a number is finite: let a tensor do so."""
        given: Any = args[0].realize() if args else None
        if isinstance(given, self.number):
            node = given.as_proxy().node
            while getattr(node.target, "__name__", "") in _CASTS:
                node = node.args[0]
            given = self.numbers.get(node)
        if given is not None and self.in_whole(translator, given):
            return given.call_method(translator, name, [], {})
        return usual(function, translator, *args) if usual else None

    def computed(self, usual: Any, function: Any, translator: Any, *args: Any) -> Any:
        """Compute a function of a tensor's number in Python when the graph runs."""
        found = [one.realize() for one in args]
        if not any(self.is_known(translator, one) for one in found):
            return usual(function, translator, *args) if usual else None
        given = [constant(function.value.__name__), *found]
        made = type(function)(self.in_python).call_function(translator, given, {})
        return made.call_method(translator, "item", [], {})

    def check(
        self, usual: Any, position: int, function: Any, translator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Trace a function that raises an error if an argument is not true."""
        given: Any = args[position].realize() if len(args) > position else None
        if self.in_whole(translator, given):
            self.add(translator, given, "all", True, raises=True)
            return constant(None)
        if usual:
            return usual(function, translator, *args, **kwargs)
        if isinstance(function.value, FunctionType):  # its code is traced
            return private(_FUNCTION)(function.value).call_function(translator, args, kwargs)
        return None

    def variables(self) -> list[Any]:
        """Return the variables of all tensors that decide, in order."""
        return [variable for one in self.met for variable in one.variables]


class LooksAnswered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers a forward's reads of fake tensors' values with the given answers, in order; a tuple
    (`tolist()`) is read number by number. If there are none, no number decides what the forward
    does: each is read as 1.
    """

    supports_higher_order_operators = True

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = bool(answers)
        self._answers = iter(pytree.tree_leaves(list(answers), is_leaf=lambda one: one is None))
        self._checks = set(map(private, _ASSERTS))
        self._looks = {private(_READ), *self._checks}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in self._looks:
            return function(*args, **kwargs or {})
        answer = next(self._answers, None)
        if function not in self._checks and not self._given:
            return _one(args[0].dtype)
        if answer is None:
            return function(*args, **kwargs or {})
        return None if function in self._checks else answer


def _one(dtype: torch.dtype) -> bool | int | float:
    real = dtype.is_floating_point or dtype.is_complex
    return dtype is torch.bool or (1.0 if real else 1)


def _listed(value: Any) -> Any:
    """Return tuples, and tuples in them, as lists."""
    return list(map(_listed, value)) if isinstance(value, tuple) else value


def values_met() -> Any:
    """Stand, in traced code, for a tuple of the values that the trace has met so far."""
    return ()


@contextlib.contextmanager
def branches_decided(answers: KnownValues, in_python: Any = None) -> Iterator[_Branches]:
    """Trace inside with branches on tensors that go past an error that the forward would raise, or
    as `answers` tell. Where neither tells, Dynamo refuses them, as it does all in a graph inside
    the graph. `in_python` is the operator that computes a function of math's.

    Returns:
        What collects the values that are met; let it `begin` when a trace does.
    """
    branches, several = _Branches(answers, in_python), private(_TUPLE)
    functions = {private(name): position for name, position in _CHECKS.items()}
    usual = handlers()
    replaced: dict[Any, Any] = {
        one: partial(branches.check, usual.get(one), position)
        for one, position in functions.items()
    }
    for one, method in _OF_NUMBERS.items():
        replaced[one] = partial(branches.of_number, usual.get(one), method)
    computed = _COMPUTED if in_python is not None else ()
    replaced |= {one: partial(branches.computed, usual.get(one)) for one in computed}
    replaced |= branches.selections.functions()
    dependent: Any = is_dependent  # whether the parameter of a distribution has no check
    replaced[dependent] = lambda _self, _tx, one: constant(dependent(one.realize().value))
    replaced[values_met] = lambda _self, _tx: several(branches.variables())
    with contextlib.ExitStack() as entered:
        entered.enter_context(ONE_TRACE_AT_A_TIME)
        entered.enter_context(taken_whole({*functions, dependent, values_met}))
        entered.enter_context(handlers_replaced(replaced))
        call, builtin = (partial(branches.call, private(_CALL)), private(_BUILTIN))
        asked = partial(branches.builtin, builtin)
        entered.enter_context(patched(_CALL, lambda *args, **more: call(*args, **more)))
        if known(_SET):
            entered.enter_context(patched(_SET, branches.setting(private(_SET))))
        entered.enter_context(patched(_BUILTIN, lambda *args, **more: asked(*args, **more)))
        changed = {
            **dict.fromkeys(JUMPS, branches.jump),
            **dict.fromkeys(KEEPS, branches.keep),
            dis.opmap["UNARY_NOT"]: branches.negate,
        }
        entered.enter_context(instructions_replaced(changed))
        yield branches


def check_left(traced: GraphModule) -> Node | None:
    """Return a check in a graph or a nested one, an operator that nothing reads; None if there is
    none."""
    targets = {*map(private, _CHECKS), "_is_all_true"}
    for module in traced.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op in ("call_function", "call_method") and node.target in targets:
                found: Node = node
                return found
    return None
