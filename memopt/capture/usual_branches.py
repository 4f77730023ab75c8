"""Traces data-dependent branches of a forward the way they go in a healthy training run.

`if not torch.isfinite(h).all(): h = torch.clamp(h, ...)` stands in many of Hugging Face's models
(DETR and its kin), `assert (x >= 0).all()` in many of the user's own. Dynamo cannot trace a branch
on a tensor's value, and of an assertion it makes an operator that nothing reads. But as a rule all
numbers are finite, and no check fails. Other branches go as they do for the example: what its
inputs alone decide is computed before each planned step, and is part of what the plan is for; all
else is returned by the graph, and a call in which it is otherwise runs unplanned.
"""

from __future__ import annotations

import contextlib
import linecache
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from memopt.capture.activation_numbers import IN_PYTHON, with_tensors_of_numbers
from memopt.capture.answers import REFUSED, Answering, Looking
from memopt.capture.input_values import is_state
from memopt.capture.usual_outcome import usual_outcome
from memopt.errors import CaptureError
from memopt.models.warned import warn
from memopt.step.assumed import ASSUMED, Assumption
from memopt.step.input_values import LOOKED, READ, VALUES, InputValue
from memopt.step.inputs import Call
from memopt.step.traced_arguments import branches_returned
from memopt.torch_private.branches import branches_decided, check_left, values_met
from memopt.torch_private.instructions import Place
from memopt.torch_private.numbers_of_tensors import (
    comparisons_open,
    has_numbers,
    items_of,
    without_numbers,
    without_unread,
)
from memopt.torch_private.values_met import Met

_MOVING = (
    "the forward reads a number of a buffer that decides what its graph holds, and changes it, so "
    "that each step would need another plan ({}): compute with the buffer itself "
    "(queue.index_copy_(1, (pointer + torch.arange(n)) % size, keys))"
)
_LOOKING: weakref.WeakKeyDictionary[nn.Module, Looking] = weakref.WeakKeyDictionary()
"""Models whose trace met such a value."""


def looks_at_values(model: nn.Module, error: Exception) -> bool:
    """Return whether a model that could not be traced is to be traced once more, with answers to
    more of what it asks of values."""
    if not refuses_values(error):
        return False
    if model in _LOOKING:
        return _LOOKING[model].asks_more()
    _LOOKING[model] = Looking()
    return True


def refuses_values(error: Exception) -> bool:
    """Return whether an error of Dynamo's says that code looks at values."""
    return REFUSED.search(str(error)) is not None


def is_looking(model: nn.Module) -> bool:
    """Return whether traces of a model assume how its data-dependent branches go."""
    return model in _LOOKING


@contextlib.contextmanager
def branches_as_usual(model: nn.Module, call: Call) -> Iterator[Callable[[GraphModule], bool]]:
    """Trace inside with a model's branches as they go as a rule, if it is one that has such.

    Returns:
        A function that records the assumptions in a traced graph, and returns whether to trace the
        model again, since the graph turns out to have an unread check.
    """
    looking = _LOOKING.get(model)
    if looking is None:

        def found(traced: GraphModule) -> bool:
            if check_left(traced) is None and not has_numbers(traced) and not compared:
                return False
            _LOOKING[model] = Looking()
            return True

        with comparisons_open() as compared:
            yield found
        return
    answers = Answering(model, call, looking)
    with (
        comparisons_open(),
        branches_decided(answers, IN_PYTHON) as branches,
        branches_returned(branches.begin, values_met),
    ):

        def note(traced: GraphModule) -> bool:
            early = [one for one in branches.met if one.compute is not None]
            known = [node for one in early if one.compute for node in one.compute.graph.nodes]
            without_unread(traced, known)
            without_numbers(traced)
            without_unread(traced, known)
            branches.selections.sizes_counted(traced)
            if answers.left_open(traced):
                return True
            with_tensors_of_numbers(traced)
            late = [one for one in branches.met if one.compute is None]
            for one in late:
                if one.number is not None and not is_state(one.node):
                    raise CaptureError(_MOVING.format(shown(one.node)))
            traced.meta[ASSUMED] = tuple(map(_assumed, late))
            traced.meta[VALUES] = tuple(map(_read, early))
            traced.meta[READ] = tuple(map(_read_out, branches.met))
            traced.meta[LOOKED] = answers.given
            left = check_left(traced)
            if left is not None:
                warn(
                    f"planned steps leave out a check of values ({shown(left)}), which stands in "
                    "a function that torch traces by itself: put it outside"
                )
            return False

        yield note


def _assumed(met: Met) -> Assumption:
    usual = usual_outcome(met.node) is not None
    return Assumption(met.goes, shown(met.node), met.raises, len(met.variables), met.decide, usual)


def _read_out(met: Met) -> Any:
    computed = met.decide is not None or (met.truth and items_of(met.node) not in ((), (met.node,)))
    read = met.goes if met.number is None else met.number
    return None if computed else read


def _read(met: Met) -> InputValue:
    assert met.compute is not None
    return InputValue(met.compute, met.truth, met.goes, shown(met.node, met.place))


def shown(node: Node, place: Place | None = None) -> str:
    """Return where a value is looked at, for people."""
    lines = [one.strip() for one in str(node.meta.get("stack_trace", "")).splitlines()]
    files: list[Any] = [i for i, one in enumerate(lines) if one.startswith("File ")]
    if place is not None and (node.op == "placeholder" or not files):
        return f'{linecache.getline(*place).strip()}, "{place[0]}", line {place[1]}'
    if not files:
        return str(node.target)
    code = lines[files[-1] + 1 :][:1]
    return ", ".join((*code, lines[files[-1]].replace("File ", "").replace(", in ", " in ")))
