"""Decides data-dependent branches and checks in a trace: Dynamo refuses such branches by itself,
and turns such checks into operators that nothing reads."""

from __future__ import annotations

import contextlib
import dis
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.distributions.constraints import is_dependent
from torch.fx import GraphModule, Node

from memopt.torch_private.access import attribute_name, patched, private
from memopt.torch_private.dynamo import constant, handlers_replaced, taken_whole
from memopt.torch_private.modes import TorchDispatchMode
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"
_TABLE = f"{_TRANSLATOR}.dispatch_table"
_TENSOR, _TUPLE = (f"torch._dynamo.variables.{one}Variable" for one in ("Tensor", "Tuple"))
_FUNCTION = "torch._dynamo.variables.UserFunctionVariable"
_NUMBER = "torch._dynamo.variables.SymNodeVariable"
_CALL = f"{_TENSOR}.call_method"
_WRAPPED = "torch._C._functorch.is_functorch_wrapped_tensor"
_IN_RANGE = "torch.ops.aten._assert_scalar.default"
_READ = "torch.ops.aten._local_scalar_dense.default"
_ASSERTS = ("torch.ops.aten._assert_async.default", "torch.ops.aten._assert_async.msg")
_HANDLERS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers"
_CHECKS = {
    "torch._assert": 0,
    "torch._assert_async": 0,
    "torch._check_tensor_all": 0,
    "torch._check_tensor_all_with": 1,
}
"""Functions that raise an error if a tensor is not true → which argument the tensor is."""
_JUMPS = tuple(
    number
    for name, number in dis.opmap.items()
    if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))
)
_ENDS = ("FOR_ITER", "JUMP", "POP_JUMP", "RERAISE", "RETURN", "SEND", "YIELD")
"""What instructions begin with that end a block."""


@dataclass(frozen=True)
class Met:
    """A value that a trace has met in a branch or a check.

    Attributes:
        variable: Dynamo's variable of a copy: the forward may change the value later.
        node: the copy's node in Dynamo's graph.
        goes: how the branch goes.
        raises: whether the forward raises an error if the branch goes the other way.
    """

    variable: Any
    node: Node
    goes: bool
    raises: bool


@dataclass
class _Branches:
    decide: Callable[[Node], bool | None]
    met: list[Met] = field(default_factory=list)
    tensor: Any = field(default_factory=lambda: private(_TENSOR))
    number: Any = field(default_factory=lambda: private(_NUMBER))
    numbers: dict[Node, Any] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)

    def in_whole(self, translator: Any, value: Any) -> bool:
        """Return whether a variable is a tensor of this thread's outermost graph: not of a nested
        graph, nor of a transform (`torch.func.grad`)."""
        output = translator.output
        if not isinstance(value, self.tensor) or output.current_tracer is not output.root_tracer:
            return False
        made = value.as_proxy().node.meta.get("example_value")
        here = threading.get_ident() == self.thread
        return here and isinstance(made, torch.Tensor) and not private(_WRAPPED)(made)

    def add(self, translator: Any, value: Any, how: str, goes: bool, raises: bool) -> None:
        """Add the result of a method of the value to the values met: a copy that nothing else can
        change."""
        own = value.call_method(translator, how, [], {})
        self.met.append(Met(own, own.as_proxy().node, goes, raises))

    def jump(self, usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        value = self.asked(translator)
        if value is not None:
            goes = _past_error(translator, instruction)
            self.settle(translator, value, goes, goes is not None)
        return usual(translator, instruction)

    def negate(self, usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        value = self.asked(translator)
        if value is not None:
            self.settle(translator, value, None, False)
        return usual(translator, instruction)

    def asked(self, translator: Any) -> Any:
        """Return the tensor whose truth an instruction tests, also as a number; else None."""
        value = translator.stack[-1]
        if isinstance(value, self.number):
            value = self.numbers.get(value.as_proxy().node)
        return value if self.in_whole(translator, value) else None

    def settle(self, translator: Any, value: Any, goes: bool | None, raises: bool) -> None:
        """Replace the tested value by a constant, if its truth is known."""
        if goes is None:
            goes = self.decide(value.as_proxy().node)
        if goes is not None:
            self.add(translator, value, "clone", goes, raises)
            translator.stack[-1] = constant(goes)

    def call(self, usual: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep a copy of each tensor that `item()` turns into a number."""
        found = usual(variable, *args, **kwargs)
        if isinstance(found, self.number) and "item" in args and self.in_whole(args[0], variable):
            self.numbers[found.as_proxy().node] = variable.call_method(args[0], "clone", [], {})
        return found

    def check(
        self, usual: Any, position: int, function: Any, translator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Trace a function that raises an error if an argument is not true."""
        given: Any = args[position].realize() if len(args) > position else None
        if self.in_whole(translator, given):
            self.add(translator, given, "all", True, True)
            return constant(None)
        if usual:
            return usual(function, translator, *args, **kwargs)
        if isinstance(function.value, FunctionType):  # its code is traced
            return private(_FUNCTION)(function.value).call_function(translator, args, kwargs)
        return None


class LooksAnswered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers a forward's reads of fake tensors' values with the given answers, in order."""

    supports_higher_order_operators = True

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = iter(answers)
        self._checks = set(map(private, _ASSERTS))
        self._looks = {private(_READ), *self._checks}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answer = next(self._answers, None) if function in self._looks else None
        if answer is None:
            return function(*args, **kwargs or {})
        return None if function in self._checks else answer


def values_met() -> Any:
    """Stand, in traced code, for a tuple of the values that the trace has met so far."""
    return ()


@contextlib.contextmanager
def branches_decided(decide: Callable[[Node], bool | None]) -> Iterator[list[Met]]:
    """Trace inside with decided branches on tensors. A branch around code that only raises an error
    skips it; others go as `decide` says for the tensor's node in Dynamo's graph. Dynamo refuses a
    branch that neither decides, and every branch in a nested graph.

    Returns:
        A list to which each value met is added; clear it when a trace begins.
    """
    branches, several = _Branches(decide), private(_TUPLE)
    functions = {private(name): position for name, position in _CHECKS.items()}
    known: dict[Any, Any] = private(_HANDLERS)()
    handlers: dict[Any, Any] = {
        one: partial(branches.check, known.get(one), position)
        for one, position in functions.items()
    }
    dependent: Any = is_dependent  # whether the parameter of a distribution has no check
    handlers[dependent] = lambda _self, _tx, one: constant(dependent(one.realize().value))
    handlers[values_met] = lambda _self, _tx: several([one.variable for one in branches.met])
    with contextlib.ExitStack() as entered:
        entered.enter_context(ONE_TRACE_AT_A_TIME)
        entered.enter_context(taken_whole(handlers))
        entered.enter_context(handlers_replaced(handlers))
        call = partial(branches.call, private(_CALL))
        entered.enter_context(patched(_CALL, lambda *args, **more: call(*args, **more)))
        for table in _tables():
            changed = dict.fromkeys(_JUMPS, branches.jump)
            changed[dis.opmap["UNARY_NOT"]] = branches.negate
            for number, function in changed.items():
                entered.callback(table.__setitem__, number, table[number])
                table[number] = partial(function, table[number])
        yield branches.met


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


def without_numbers(traced: GraphModule) -> None:
    """Remove from a graph, in place, `item()` calls that are read only by range checks."""
    checks = private(_IN_RANGE)
    found = dict[Node, None]()

    def unread(node: Node) -> bool:
        alone = node.op != "output" and all(unread(user) for user in node.users)
        return alone and (bool(node.users) or node.target in (checks, "item"))

    def collect(node: Node) -> None:
        for user in node.users:
            collect(user)
        found.setdefault(node)  # after all that read it

    for item in traced.graph.find_nodes(op="call_method", target="item"):
        if unread(item):
            collect(item)
    for node in found:
        traced.graph.erase_node(node)
    if found:
        traced.recompile()


def _past_error(translator: Any, instruction: Any) -> bool | None:
    """Return the truth of the tested value with which a jump skips code that only raises an error;
    None if neither way, or each, leads to such code."""
    at = translator.indexof
    ways = {"TRUE" in instruction.opname: at[instruction.target]}
    ways["TRUE" not in instruction.opname] = at[instruction] + 1
    raising = [truth for truth, index in ways.items() if _raises(translator.instructions[index:])]
    return not raising[0] if len(raising) == 1 else None


def _raises(instructions: Any) -> bool:
    for one in instructions:
        if one.opname == "RAISE_VARARGS":
            return True
        if one.opname.startswith(_ENDS):
            return False
    return False


def _tables() -> Iterator[list[Any]]:
    """Yield the table of handlers by instruction of each of Dynamo's translator classes."""
    waiting, name = [private(_TRANSLATOR)], attribute_name(_TABLE)
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if name in vars(one):
            yield vars(one)[name]
