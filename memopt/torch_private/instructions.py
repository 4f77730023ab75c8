"""Dynamo's translators of instructions: where in the code a trace is, and where jumps lead."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from memopt.torch_private.access import (
    FILES_OF_MEMOPT,
    FILES_OF_TORCH,
    attribute_name,
    patched,
    private,
)

_TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"
_TABLE = f"{_TRANSLATOR}.dispatch_table"
_ASSERTION = "torch._dynamo.symbolic_convert._detect_and_normalize_assert_statement"
"""What tells Dynamo to make an operator of an assertion."""
_OPERANDS = tuple(f"torch._dynamo.variables.{one}Variable" for one in ("Tensor", "SymNode"))
JUMPS = tuple(
    number
    for name, number in dis.opmap.items()
    if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))
)
KEEPS = tuple(
    number for name, number in dis.opmap.items() if name.startswith("JUMP_IF_") and "OR_POP" in name
)
"""Jumps that leave the value which they ask where they go."""
_ENDS = ("FOR_ITER", "JUMP", "POP_JUMP", "RERAISE", "RETURN", "SEND", "YIELD")
"""What instructions begin with that end a block."""


Place = tuple[str, int]
"""File and line of the user's code."""


def place_of(translator: Any) -> Place:
    """Return the line of the user's code at which a trace is."""
    while translator.parent is not None and is_library(translator.f_code.co_filename):
        translator = translator.parent
    positions = translator.current_instruction.positions
    return translator.f_code.co_filename, positions.lineno if positions else 0


def is_library(path: str) -> bool:
    """Return whether a file is torch's or memopt's."""
    return path.startswith((FILES_OF_TORCH, FILES_OF_MEMOPT))


def past_error(translator: Any, instruction: Any) -> bool | None:
    """Return the truth of a value with which a jump goes past code that does nothing but raise an
    error; None: there is none, or both ways lead to one."""
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


@contextlib.contextmanager
def instructions_replaced(replacing: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """Trace inside with other functions at instructions, by their numbers; each is called with the
    usual one first, then as that is (translator, instruction)."""
    with contextlib.ExitStack() as entered:
        for table in _tables():
            for number, function in replacing.items():
                entered.callback(table.__setitem__, number, table[number])
                table[number] = partial(function, table[number])
        yield


def _tables() -> Iterator[list[Any]]:
    """Yield what Dynamo's translators do at each instruction, a list for each class."""
    waiting, name = [private(_TRANSLATOR)], attribute_name(_TABLE)
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if name in vars(one):
            yield vars(one)[name]


@contextlib.contextmanager
def objects_asserted() -> Iterator[None]:
    """Trace inside with assertions of lists and other objects (`assert layers, "..."`), whose truth
    is known: of each assertion, Dynamo makes an operator on tensors, which takes none."""
    operands = tuple(map(private, _OPERANDS))

    def jump(usual: Callable[[Any, Any], Any], translator: Any, instruction: Any) -> Any:
        asked = translator.stack[-1].realize()
        plain = isinstance(asked, operands) or asked.is_python_constant()
        if plain or past_error(translator, instruction) is None:
            return usual(translator, instruction)
        with patched(_ASSERTION, lambda *_: False):
            return usual(translator, instruction)

    with instructions_replaced(dict.fromkeys(JUMPS, jump)):
        yield
