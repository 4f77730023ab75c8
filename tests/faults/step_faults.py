"""Faults in the step of a planned module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tests.faults.fault import Part, Room, fault
from tests.faults.injected import AtAllocation, AtLine, AtOperator, Injected
from tests.faults.subjects import DropIn, drop_in, programs

AS_BEFORE = "all as before"
AFTER_FORWARD = "all as after the forward"
Half = Callable[[DropIn, AbstractContextManager[Any]], object]
EXPECTED = (Injected, torch.OutOfMemoryError, KeyboardInterrupt)


def everywhere(room: Room, half: Half, injection: Callable[..., Any], few: int = 1) -> int:
    """Let half of a step fail at the places of an injection, under every program."""
    happened = 0
    for program in programs(room):
        one = drop_in(program)
        whole = injection()
        assert one.fails(step=partial(half, one, whole)) is None
        assert whole.seen > 0
        for number in room.places(whole.seen, few):
            point = injection(number)
            error = one.fails(step=partial(half, one, point))
            if error is None:
                assert point.seen < number
                continue
            assert isinstance(error, EXPECTED), (program, number, error)
            happened += 1
        one.check_next()
    return happened


def in_forward(one: DropIn, injection: AbstractContextManager[Any]) -> object:
    return one.forward(injection)


def in_backward(one: DropIn, injection: AbstractContextManager[Any]) -> object:
    return one.backward(injection)


HALVES: dict[str, tuple[Half, str]] = {
    "forward": (in_forward, AS_BEFORE),
    "backward": (in_backward, AFTER_FORWARD),
}
EVERYWHERE: dict[str, tuple[Callable[..., Any], str]] = {
    "an operator fails": (AtOperator, "its own error"),
    "the memory runs out at an allocation": (AtAllocation, "torch's error"),
    "Ctrl-C at an operator": (partial(AtOperator, error=KeyboardInterrupt), "KeyboardInterrupt"),
    "Ctrl-C at a line of memopt's or of the generated code": (AtLine, "KeyboardInterrupt"),
}
for _where, (_half, _then) in HALVES.items():
    for _what, (_injection, _said) in EVERYWHERE.items():
        fault(Part.STEP, f"{_what}, in the {_where}", f"{_said}; {_then}")(
            partial(everywhere, half=_half, injection=_injection)
        )
