"""Answers what a trace asks of values: as they are as a rule, as the example's inputs decide, or as
they were when the example ran."""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from memopt.capture.activation_numbers import IN_PYTHON, of_math
from memopt.capture.input_values import (
    computed_from_inputs,
    is_drawn,
    is_state,
    number_of_state,
    value_now,
)
from memopt.capture.usual_outcome import usual_outcome
from memopt.errors import CaptureError
from memopt.step.inputs import Call
from memopt.step.operators import CallsThrough
from memopt.step.ranks import ranks_of
from memopt.torch_private.access import private
from memopt.torch_private.aot import FakeTensor
from memopt.torch_private.instructions import Place, is_library
from memopt.torch_private.numbers_of_tensors import (
    KEPT,
    computed_by,
    has_numbers,
    has_open_sizes,
    items_of,
)
from memopt.torch_private.values_met import KnownValue, KnownValues
from memopt.user_code.restored_state import forward_restored

REFUSED = re.compile(
    r"[Dd]ata[- ]dependent|_local_scalar_dense|[Uu]nbacked|_check_tensor_all"
    r"|Sym(Int|Float|Bool|Node)|distributions/constraints\.py"
)
_READ = "torch.ops.aten._local_scalar_dense.default"


@dataclass
class Looking:
    """What traces of a model have asked so far.

    Attributes:
        numbers: where a number of the inputs is read that has to be known.
        records: whether values that depend on more than the inputs have to be known.
        pending: where numbers of the inputs were read that a trace left open.
        compared: where others were read whose comparisons were answered; a shape may need them.
        held: where numbers of parameters and buffers were read, which a size may need.
        unknown: whether the truth of a value that depends on more was asked for.
    """

    numbers: set[Place] = field(default_factory=set)
    records: bool = False
    pending: set[Place] = field(default_factory=set)
    compared: set[Place] = field(default_factory=set)
    held: set[Place] = field(default_factory=set)
    unknown: bool = False
    recorded: tuple[weakref.ref[Call], dict[Place, list[Any]]] | None = None

    def asks_more(self, sized: bool = True) -> bool:
        """Return whether the next trace gets more answers than the last, which was refused, or
        leaves sizes open if `sized`."""
        if not self.pending <= self.numbers:
            self.numbers |= self.pending
            return True
        if self.unknown and not self.records:
            self.records = True
            return True
        more = not self.compared <= self.numbers
        self.numbers |= self.compared
        if not more and sized and not self.held <= self.numbers:
            self.numbers |= self.held
            return True
        return more


class Answering(KnownValues):
    """Answers a trace of a call.

    Attributes:
        given: the answers so far that no rule gives. A trace of the same call without values gets
            the same (`Call.looked`).
    """

    def __init__(self, model: nn.Module, call: Call, looking: Looking) -> None:
        self._model, self._call, self._looking = model, call, looking
        # Ranks that communicate in a forward cannot run it again alone.
        self._knows = ranks_of(model) is None
        self.begin()

    def begin(self) -> None:
        """Answer from the first question on."""
        self.given: list[Any] = []
        self._again = deque(self._call.looked)
        self._values: dict[Node, Any] = {}
        self._open: dict[Node, Place] = {}
        self._looking.pending, self._looking.compared = set(), set()
        self._looking.held = set()
        self._looking.unknown = False
        found = self._recorded() if self._knows and self._looking.records else {}
        self._heard = {place: deque(values) for place, values in found.items()}

    def truth(self, node: Node, place: Place) -> KnownValue | None:
        """Return the truth of the value of a node in Dynamo's graph, a tensor or a number."""
        items = items_of(node)
        heard = None if items else self._hear(place)
        usual = usual_outcome(node)
        if usual is not None or not self._knows:
            return None if usual is None else KnownValue(usual)
        compute, value = self._of_inputs(node, truth=True)
        if compute is not None:
            value = self._answer(value)
        elif is_drawn(node):
            value = None
        elif items:
            value = self._of_numbers(node)
        else:
            value = self._answer(heard)
        if value is None:
            self._looking.unknown = True
            return None
        answered = (self._open.pop(item.all_input_nodes[0], None) for item in items)
        self._looking.compared.update(one for one in answered if one is not None)
        self._looking.pending = set(self._open.values())
        return KnownValue(bool(value), compute)

    def number(
        self, node: Node, place: Place, nested: bool, state: Mapping[str, Any] | None = None
    ) -> KnownValue | None:
        """Return the number in a tensor, or for `nested` all in nested lists, or a size that may
        depend on parameters and buffers: `state` has these, by their targets."""
        if node.target is IN_PYTHON:
            self._values[node] = of_math(node, self._number_of)
        elif not nested:
            self._values[node] = node.meta[KEPT] if KEPT in node.meta else self._hear(place)
        example = node.meta["example_value"]
        real = example.is_floating_point() or example.is_complex()
        if not self._knows or real:
            return None
        compute, found = self._of_inputs(node, truth=False, item=not nested)
        looks = not nested and example.dtype is torch.bool and not is_drawn(node)
        held = compute is None and not looks and (not nested or bool(state)) and is_state(node)
        if held and state:
            self._values[node] = number_of_state(node, state)
            held = self._values[node] is not None or bool(self._again)
        if compute is None and not looks and not held:
            return None
        if held and place not in self._looking.numbers:
            self._looking.held.add(place)
            return None
        if not nested and place not in self._looking.numbers:
            self._open[node] = place
            self._looking.pending = set(self._open.values())
            return None
        if compute is not None:
            value = self._answer(found)
        else:
            usual = usual_outcome(node)
            value = self._answer(self._values[node]) if usual is None else usual
            self._looking.unknown |= value is None
        return None if value is None else KnownValue(value, compute)

    def left_open(self, traced: GraphModule) -> bool:
        """Return whether another trace knows more of what this one left open: numbers of the inputs
        that its graph reads, or comparisons that Dynamo took for decided.

        Raises:
            CaptureError: it left such a comparison open, and no trace knows more.
        """
        asks = has_numbers(traced) or self._looking.unknown
        if asks and self._looking.asks_more(has_open_sizes(traced)):
            return True
        if self._looking.unknown:
            raise CaptureError(
                "the model compares a number of a tensor, which may be NaN or infinite, and a "
                "trace knows neither: ask with math.isnan, math.isinf or math.isfinite"
            )
        return False

    def _of_inputs(
        self, node: Node, truth: bool, item: bool = False
    ) -> tuple[GraphModule | None, Any]:
        """Return what computes a value from the inputs alone, and the value now. None: it depends
        on more, or random numbers take part; or the value is not known."""
        compute = computed_from_inputs(node, len(self._call.leaves), item)
        if compute is None:
            return None, None
        value, drawn = value_now(compute, truth, self._call.leaves)
        return (None, None) if drawn else (compute, None if self._again else value)

    def _of_numbers(self, node: Node) -> Any:
        if self._again:
            return self._answer(None)
        number = self._number_of(node)
        return None if number is None else self._answer(bool(number))

    def _number_of(self, node: Any) -> Any:
        """Return the number that a node computes in the example; None: not known."""
        items = items_of(node) if isinstance(node, Node) else ()
        numbers = [self._values.get(item.all_input_nodes[0]) for item in items]
        if not items or None in numbers:
            return None if isinstance(node, Node) else node
        compute = computed_by(node, items)
        return numbers[0] if compute is None else compute(*numbers)

    def _answer(self, value: Any) -> Any:
        if self._again:
            value = self._again.popleft()
        if value is not None:
            self.given.append(value)
        return value

    def _hear(self, place: Place) -> Any:
        """Return the next number that the example's run read in a line; None: not known."""
        heard = self._heard.get(place)
        return heard.popleft() if heard else None

    def _recorded(self) -> dict[Place, list[Any]]:
        """Return what a forward of the call reads, by line."""
        known = self._looking.recorded
        if known is not None and known[0]() is self._call:
            return known[1]
        if any(isinstance(one, FakeTensor) or one.is_meta for one in self._tensors()):
            return {}
        heard = _Numbers()
        # The trace says what is wrong, if anything is.
        with contextlib.suppress(Exception), heard, forward_restored(self._model, self._call):
            pass
        self._looking.recorded = weakref.ref(self._call), heard.found
        return heard.found

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._call.tensors()
        yield from self._model.parameters()
        yield from self._model.buffers()


class _Numbers(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    """Hears what is read out of tensors, by the line of the user's code that does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Place, list[Any]] = {}
        self._reads = private(_READ), torch.ops.aten.equal.default, torch.ops.aten.allclose.default

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = func(*args, **kwargs)
        if func in self._reads:
            frame = sys._getframe(1)
            while is_library(frame.f_code.co_filename) and frame.f_back is not None:
                frame = frame.f_back
            place = frame.f_code.co_filename, frame.f_lineno
            self.found.setdefault(place, []).append(value)
        return value
