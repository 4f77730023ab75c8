"""The operators that calls of a custom autograd function, and their backwards, are in a graph."""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.errors import CaptureError, ExecutionError
from memopt.step.operators import OPAQUE, define
from memopt.step.signature import declare_costliest
from memopt.torch_private import pytree
from memopt.torch_private.tensors import version_of
from memopt.user_code.opaque import (
    Autocast,
    Context,
    Function,
    Place,
    Returned,
    StridedLayout,
    as_when_traced,
    id_of_storage,
    is_run_again,
    returned,
    why_not_same,
    with_layouts,
)

_RUNS_ONCE = (torch.Tag.nondeterministic_seeded,)
"""The tag by which memopt runs an operator once in a step, in the forward's order."""
_WITHOUT = "Train without a plan (memopt.unwrap(model), or planned.original)"


class Marker(enum.Enum):
    """Stands for a tensor among a call's operands."""

    TENSOR = "tensor"


@dataclass(frozen=True, eq=False)
class CallForm:
    """What calls of a custom function have in common that one operator stands for.

    Attributes:
        function: the custom function.
        constants: the operands, flat; None where a tensor is.
        nest: how the operands nest.
        given: layouts of the tensors among them.
        needs: which of these tensors require a gradient.
        autocast: autocast's settings.
    """

    function: Function
    constants: tuple[Any, ...]
    nest: Any
    given: tuple[StridedLayout, ...]
    needs: tuple[bool, ...]
    autocast: tuple[Autocast, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What distinguishes forms of one function."""
        return self.constants, self.nest, self.given, self.needs, self.autocast

    def operands(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the operands of a call with these tensors."""
        waiting = iter(tensors)
        leaves = [next(waiting) if one is Marker.TENSOR else one for one in self.constants]
        found: list[Any] = pytree.tree_unflatten(leaves, self.nest)
        return found

    def make_costliest(self, operands: Sequence[Tensor]) -> None:
        """Change operands, of which the call's tensors are the last, to those for which the
        function needs the most memory, if it tells."""
        change = getattr(self.function, "costliest", None)
        if change is not None:
            change(*self.operands(operands[len(operands) - len(self.given) :]))

    @functools.cached_property
    def places(self) -> tuple[int | None, ...]:
        """For every operand, its index among the tensors; None if it is none."""
        found = self.operands([Place("given", i) for i in range(len(self.given))])
        return tuple(one.number if isinstance(one, Place) else None for one in found)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For every operand, whether it requires a gradient."""
        return tuple(place is not None and self.needs[place] for place in self.places)

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Returned]:
        """Run the function's forward; return the operator's results, and their description."""
        given = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(tensors, self.needs, strict=True)
        ]
        operands, context = self.operands(given), Context(self.needs_input_grad)
        with as_when_traced(self.autocast):
            if sets_up_apart(self.function):
                output = self.function.forward(*operands)
                self.function.setup_context(context, tuple(operands), output)
            else:
                output = self.function.forward(context, *operands)
            return returned(context, output, given)

    @functools.cached_property
    def planned(self) -> Returned:
        """What the forward returns and keeps.

        Raises:
            CaptureError: no plan can hold it; the message says why.
        """

        def run(tensors: list[Tensor]) -> Returned:
            self.make_costliest(tensors)
            before = [version_of(one) for one in tensors]
            found = self.run(tensors)[1]
            if [version_of(one) for one in tensors] != before:
                raise CaptureError(
                    f"{self.shown} cannot be traced, and changes a tensor in place that it is "
                    "given: let it return a new tensor"
                )
            return found

        first = with_layouts(self.function, self.given, run)
        differs = why_not_same(first, with_layouts(self.function, self.given, run))
        if differs is not None:
            raise CaptureError(f"{self.shown} cannot be traced, and no plan can hold it: {differs}")
        if not first.made:
            raise CaptureError(f"{self.shown} cannot be traced, and returns no tensor")
        return first

    @property
    def shown(self) -> str:
        """The function's name."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @functools.cached_property
    def operator(self) -> Any:
        """The forward's operator: tensors of the call → results."""

        def kernel(*tensors: Tensor) -> Any:
            results, now = self.run(tensors)
            differs = why_not_same(self.planned, now)
            if differs is not None:
                raise ExecutionError(
                    f"{self.shown}, which the plan runs as one operator, behaved differently from "
                    f"when it was captured: {differs}. {_WITHOUT}"
                )
            return _packed(results)

        made = _operator(self, "", len(self.given), self.planned.made, kernel)
        SHOWN[made] = self.shown
        if not is_run_again(self.function):
            WITH_EFFECTS.add(made)
        return made

    def restored(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> Context:
        """Return the context that the backward gets."""

        def value(place: Place) -> Any:
            if place.where == "constant":
                return place.value
            return (given if place.where == "given" else made)[place.number]

        context = Context(self.needs_input_grad)
        context.saved = tuple(map(value, self.planned.saved))
        for name, leaves, nest in self.planned.attributes:
            setattr(context, name, pytree.tree_unflatten(list(map(value, leaves)), nest))
        return context

    @functools.cached_property
    def kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Indices of the tensors given, and of the results, that the backward reads."""
        places = [*self.planned.saved]
        for _, leaves, _ in self.planned.attributes:
            places += leaves
        given = sorted({one.number for one in places if one.where == "given"})
        made = sorted({one.number for one in places if one.where == "made"})
        return tuple(given), tuple(made)


@dataclass(frozen=True, eq=False)
class BackwardForm:
    """A backward of calls of one form, for output gradients of these layouts.

    Attributes:
        call: the form of the calls.
        gradients: layouts of the output gradients; None where there is none.
        autocast: autocast's settings.
    """

    call: CallForm
    gradients: tuple[StridedLayout | None, ...]
    autocast: tuple[Autocast, ...]

    @functools.cached_property
    def read(self) -> tuple[StridedLayout, ...]:
        """Layouts of the operator's operands: output gradients, then what the forward kept."""
        given, made = self.call.kept
        return (
            *(one for one in self.gradients if one is not None),
            *(self.call.given[i] for i in given),
            *(self.call.planned.made[i] for i in made),
        )

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
        """Run the function's backward; return the gradients that it computes, and of which of the
        call's tensors they are."""
        call, waiting = self.call, iter(tensors)
        gradients = [None if one is None else next(waiting) for one in self.gradients]
        given, made = ({index: next(waiting) for index in kept} for kept in call.kept)
        context = call.restored(given, made)  # type: ignore[arg-type]
        backward = call.function.backward
        if call.function.vjp is not torch.autograd.Function.vjp:
            backward = call.function.vjp
        with as_when_traced(self.autocast):
            found = backward(context, *gradients)
        found = found if isinstance(found, (tuple, list)) else (found,)
        storages = {id_of_storage(one) for one in tensors}
        results, owners = [], []
        for place, one in zip(call.places, found, strict=False):
            if place is None or one is None or not call.needs[place]:
                continue
            result = one.clone() if id_of_storage(one) in storages else one
            storages.add(id_of_storage(result))
            results.append(result.detach())
            owners.append(place)
        return results, tuple(owners)

    @functools.cached_property
    def planned(self) -> tuple[tuple[StridedLayout, ...], tuple[int, ...]]:
        """Layouts of the gradients that the backward computes, and of which tensors they are."""

        def run(tensors: list[Tensor]) -> tuple[tuple[StridedLayout, ...], tuple[int, ...]]:
            self.call.make_costliest(tensors)
            results, owners = self.run(tensors)
            return tuple(map(StridedLayout.of, results)), owners

        return with_layouts(self.call.function, self.read, run)

    @functools.cached_property
    def operator(self) -> Any:
        """The backward's operator: what `read` describes → gradients."""

        def kernel(*tensors: Tensor) -> Any:
            results, owners = self.run(tensors)
            now = tuple(map(StridedLayout.of, results)), owners
            if now != self.planned:
                raise ExecutionError(
                    f"the backward of {self.call.shown}, which the plan runs as one operator, "
                    f"behaved differently from when it was captured: {now}, planned "
                    f"{self.planned}. {_WITHOUT}"
                )
            return _packed(results)

        return _operator(self.call, "backward", len(self.read), self.planned[0], kernel)


_names: set[str] = set()
SHOWN: dict[Any, str] = {}
"""The forward's operators → the custom functions' names."""
WITH_EFFECTS: set[Any] = set()
"""Those of them whose code may draw or change something."""
LOCK = threading.RLock()


def _operator(
    form: CallForm, part: str, count: int, made: Sequence[StridedLayout], kernel: Any
) -> Any:
    """Define an operator of `count` tensors, under a name that a later process gives it again."""
    name = re.sub(r"\W+", "_", form.function.__qualname__).strip("_")
    text = repr((form.shown, form.key, part, made)).encode()
    digest = hashlib.sha256(text).hexdigest()[:12]
    base = "_".join(filter(None, (name, part))) + f"_f{digest}"
    with LOCK:
        number = 0
        while f"{base}_{number}" in _names:
            number += 1  # another class of the same name
        full = f"{base}_{number}"
        _names.add(full)
    operands = ", ".join(f"Tensor x{i}" for i in range(count))
    results = ", ".join(["Tensor"] * len(made))
    schema = f"{full}({operands}) -> {results if len(made) == 1 else f'({results})'}"

    def described(*_: Tensor) -> Any:
        return _packed([one.empty() for one in made])

    operator = define(schema, kernel, described, _RUNS_ONCE, OPAQUE)
    declare_costliest(operator, form.make_costliest)
    return operator


def _packed(results: list[Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def sets_up_apart(function: Function) -> bool:
    """Return whether a custom function's context is set up apart from its forward."""
    return function.setup_context is not torch.autograd.Function.setup_context
