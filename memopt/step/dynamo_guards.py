"""Reads Dynamo's guards: what a trace read besides its inputs, and what it changes.

A guard names the place that was read (an expression over the traced frame's locals `L` and globals
`G`) and the property that the trace relied on: a constant's value, an object's type, the length of
a list, a dict without hooks. `torch.compile` compiles again when one fails; an export, by which
memopt captures, collects them and drops them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memopt.errors import CaptureError
from memopt.step.changes import Change, changes_heard, expression_of
from memopt.step.input_values import InputValue
from memopt.torch_private.absences import absences_heard
from memopt.torch_private.access import patched, private
from memopt.torch_private.dynamo import guard_helpers, shapes_compared_if
from memopt.torch_private.regions import Reused
from memopt.torch_private.table import SUPPORTED


@dataclass(frozen=True)
class DynamoGuard:
    """One guard.

    Attributes:
        kind: "CONSTANT_MATCH", "TYPE_MATCH"...
        name: the expression that reads the guarded value; "" for torch's global state.
        detail: the argument of the kind: an attribute, a key, another expression.
    """

    kind: str
    name: str
    detail: Any = None


@dataclass(frozen=True)
class TraceGuards:
    """The guards of one trace.

    Attributes:
        guards: in no particular order.
        names: values of the names in the expressions, besides Python's own functions.
        scope: values of the globals that the expressions read.
        code: the code objects of all Python functions that were traced.
        changes: the forward's changes to objects that existed before it.
        values: what it reads of its inputs' values.
        numbers: the tensors that it made of numbers, by the expressions that make them.
    """

    guards: tuple[DynamoGuard, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)
    scope: Mapping[str, Any] = field(default_factory=dict)
    code: frozenset[types.CodeType] = frozenset()
    changes: tuple[Change, ...] = ()
    values: tuple[InputValue, ...] = ()
    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def guards_heard(reused: Reused | None = None) -> Iterator[Callable[[], TraceGuards]]:
    """Record the guards of traces made inside; yields a function that returns those of the last.

    Args:
        reused: regions that are not traced; what holds of the region that was holds of them.

    Torch also compiles the guards, only to see whether they contradict shapes that are declared to
    vary, and drops them. That takes long, and happens here only if a shape varies.

    Only one thread at a time may enter it.
    """
    captured = private(_CAPTURE)
    heard, varies = TraceGuards(), True
    absent: list[DynamoGuard] = []

    def missed(kind: str, source: Any, detail: Any) -> None:
        absent.append(DynamoGuard(kind, expression_of(source), detail))

    @functools.wraps(captured)
    def listening(*args: Any, **kwargs: Any) -> Any:
        nonlocal heard, varies
        result = captured(*args, **kwargs)
        # Without symbols for sizes (those of floats, z..., are none) no declared shape can be
        # contradicted.
        shape_env = getattr(getattr(result.backend_input, "fake_mode", None), "shape_env", None)
        symbols = getattr(shape_env, "var_to_range", None)
        varies = symbols is None or any(not one.name.startswith("z") for one in symbols)
        try:
            heard = _heard(result.graph_capture_output, absent, reused or Reused(), changed())
        except AttributeError as error:
            raise CaptureError(
                f"this torch ({torch.__version__}) keeps what a trace read elsewhere ({error}); "
                f"memopt supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}"
            ) from error
        return result

    with (
        changes_heard() as changed,
        patched(_CAPTURE, listening),
        absences_heard(missed),
        shapes_compared_if(lambda: varies),
    ):
        yield lambda: heard


_CAPTURE = "torch._dynamo.functional_export.fullgraph_capture"


def _heard(
    output: Any, absent: list[DynamoGuard], reused: Reused, changes: tuple[Change, ...]
) -> TraceGuards:
    graph = output.output_graph
    guards = absent + [
        _guard(one.create_fn_name(), one.name, _detail(one.create_fn)) for one in graph.guards
    ]
    guards += [
        DynamoGuard("DICT_KEYS_MATCH", expression_of(source)) for source in graph.guard_on_key_order
    ]
    guards += _of_reused(guards, reused)
    # A place is guarded once for each time that it was read.
    distinct = {(one.kind, one.name, repr(one.detail)): one for one in guards}.values()
    places = (*(one.name for one in distinct), *(one.source for one in changes))
    read = {name for place in places for name in re.findall(r"\bG\['([^']+)'\]", place)}
    scope = {name: graph.global_scope[name] for name in read if name in graph.global_scope}
    helpers = guard_helpers()
    code = frozenset(output.traced_code)
    return TraceGuards(tuple(distinct), helpers, scope, code, changes)


def _guard(kind: str, name: str, detail: Any) -> DynamoGuard:
    if kind == "HASATTR" and detail is None:  # torch 2.11: of the attribute, not of its owner
        found = re.fullmatch(r"getattr\((.*), '(.*)'\)", name)
        name, detail = found.groups() if found else name.rpartition(".")[::2]
    return DynamoGuard(kind, name, detail)


def _of_reused(guards: list[DynamoGuard], reused: Reused) -> Iterator[DynamoGuard]:
    """Yield the guards of regions that reuse the trace of another one: its guards, except those on
    the class alone of an object, with the arguments replaced by theirs."""
    within: dict[str, list[DynamoGuard]] = {}
    for replaced in reused.replaced:
        for old, new in ((expression_of(a), expression_of(b)) for a, b in replaced.items()):
            if old not in within:
                own = f"type({old})"
                within[old] = [one for one in guards if old in one.name and own not in one.name]
            for one in within[old]:
                detail = one.detail
                if isinstance(detail, str):
                    detail = detail.replace(old, new)
                yield DynamoGuard(one.kind, one.name.replace(old, new), detail)


def _detail(create: Any) -> Any:
    """Return the first argument of a guard's kind, if it has any; for a source, its expression."""
    if not isinstance(create, functools.partial):
        return None
    given = (*create.args, *create.keywords.values())
    return expression_of(given[0]) if given else None
