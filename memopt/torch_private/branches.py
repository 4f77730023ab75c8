"""Branches on tensors' values in a trace: Dynamo refuses them, unless it is told how they go."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from torch.fx import Node

from memopt.torch_private.access import attribute_name, private
from memopt.torch_private.dynamo import constant, handlers_replaced, taken_whole
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"
_TABLE = f"{_TRANSLATOR}.dispatch_table"
_TENSOR, _TUPLE = (f"torch._dynamo.variables.{one}Variable" for one in ("Tensor", "Tuple"))
_JUMPS = tuple(
    number
    for name, number in dis.opmap.items()
    if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))
)

Met: TypeAlias = list[tuple[Any, Node, bool]]
"""Dynamo's variables of the values that a trace has branched on, their nodes, and how it went."""


def values_met() -> Any:
    """Stand, in traced code, for a tuple of the values that the trace has branched on so far."""
    return ()


@contextlib.contextmanager
def branches_decided(decide: Callable[[Node], bool | None]) -> Iterator[Met]:
    """Trace inside with branches on tensors that go as `decide` says of the tensor's node in
    Dynamo's graph; None: Dynamo refuses it, as it does all in a graph inside the graph.

    Returns:
        A list to which each value is added that decides a branch; clear it when a trace begins.
    """
    met: Met = []
    tensor, several = private(_TENSOR), private(_TUPLE)

    def jump(usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        stack, output = translator.stack, translator.output
        if isinstance(stack[-1], tensor) and output.current_tracer is output.root_tracer:
            node = stack[-1].as_proxy().node
            goes = decide(node)
            if goes is not None:
                if all(node is not one for _, one, _ in met):
                    met.append((stack[-1], node, goes))
                stack[-1] = constant(goes)
        return usual(translator, instruction)

    def all_met(_variable: Any, _translator: Any) -> Any:
        return several([one for one, _, _ in met])

    with contextlib.ExitStack() as entered:
        entered.enter_context(ONE_TRACE_AT_A_TIME)
        entered.enter_context(taken_whole([values_met]))
        entered.enter_context(handlers_replaced({values_met: all_met}))
        for table in _tables():
            for number in _JUMPS:
                entered.callback(table.__setitem__, number, table[number])
                table[number] = partial(jump, table[number])
        yield met


def _tables() -> Iterator[list[Any]]:
    """Yield what Dynamo's translators do at each instruction, a list for each class."""
    waiting, name = [private(_TRANSLATOR)], attribute_name(_TABLE)
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if name in vars(one):
            yield vars(one)[name]
