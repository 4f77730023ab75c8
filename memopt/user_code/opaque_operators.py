"""Makes the operators that a custom autograd function's calls are in a traced graph."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from memopt.errors import CaptureError, ExecutionError
from memopt.step.operators import OPAQUE, RUN_ONCE, Substitute, define
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
    returned,
    why_not_same,
    with_layouts,
)

_RUNS_ONCE = (torch.Tag.nondeterministic_seeded,)
"""The tag by which memopt runs an operator once in a step, in the forward's order."""
_WITHOUT = "Train without a plan (memopt.unwrap(model), or planned.original)"


class _Marker(enum.Enum):
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
        leaves = [next(waiting) if one is _Marker.TENSOR else one for one in self.constants]
        found: list[Any] = pytree.tree_unflatten(leaves, self.nest)
        return found

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
            if _sets_up_apart(self.function):
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
        _shown[made] = self.shown
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


@dataclass
class _Known:
    """The forms of a custom function that operators were made for."""

    calls: list[CallForm] = field(default_factory=list)
    functions: dict[int, Any] = field(default_factory=dict)


_known: dict[Function, _Known] = {}
_names: set[str] = set()
_shown: dict[Any, str] = {}
"""The forward's operators → the custom functions' names."""
_lock = threading.RLock()


def called(function: Function, *operands: Any, **named: Any) -> Any:
    """Call a custom function by its operators, recorded by autograd."""
    leaves, nest = pytree.tree_flatten(_in_order(function, operands, named))
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    form = CallForm(
        function=function,
        constants=tuple(_Marker.TENSOR if isinstance(one, Tensor) else one for one in leaves),
        nest=nest,
        given=tuple(map(StridedLayout.of, tensors)),
        needs=tuple(one.requires_grad for one in tensors),
        autocast=Autocast.now(tensors),
    )
    with _lock:
        known = _known.setdefault(function, _Known())
        same = next((one for one in known.calls if one.key == form.key), None)
        if same is None:
            known.calls.append(form)
            known.functions[id(form)] = _differentiable(form)
        form = same or form
    outputs = known.functions[id(form)].apply(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    waiting = iter(outputs)
    planned = form.planned
    found = tuple(
        next(waiting) if place.where == "made" else place.value for place in planned.outputs
    )
    return found[0] if planned.single else found


def call_of(function: Function) -> Substitute:
    """Return the function that stands for calls of a custom function in a graph."""
    return Substitute(function, called)


def opaque_notes(module: GraphModule) -> tuple[str, ...]:
    """Return a note that names the custom functions that a graph calls as they are."""
    targets = {n.target for n in module.graph.nodes if n.op == "call_function"}
    found = {_shown[one] for one in targets if one in _shown}
    found |= {str(one.name()).partition(".")[0] for one in targets & RUN_ONCE}
    if not found:
        return ()
    names = ", ".join(sorted(found))
    return (f"Run as they are, once in a step, since they cannot be traced: {names}.",)


def _differentiable(form: CallForm) -> Any:
    """Make the autograd function that calls a form's operators."""
    backwards: dict[Any, BackwardForm] = {}

    class OpaqueFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            planned = form.planned
            results = form.operator(*tensors)
            results = results if isinstance(results, tuple) else (results,)
            ctx.set_materialize_grads(planned.materialize)
            given, made = form.kept
            ctx.save_for_backward(*(tensors[i] for i in given), *(results[i] for i in made))
            places = [one.number for one in planned.outputs if one.where == "made"]
            marked = [planned.outputs[i] for i in planned.constant]
            constant = [results[one.number] for one in marked if one.where == "made"]
            ctx.mark_non_differentiable(*constant)
            outputs = tuple(results[i] for i in places)
            return outputs[0] if len(outputs) == 1 else outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            waiting = iter(gradients)
            whole = [next(waiting) if one.where == "made" else None for one in form.planned.outputs]
            present = [one for one in whole if one is not None]
            layouts = tuple(None if one is None else StridedLayout.of(one) for one in whole)
            made = BackwardForm(form, layouts, Autocast.now(present))
            key = layouts, made.autocast
            with _lock:
                made = backwards.setdefault(key, made)
            found: list[Tensor | None] = [None] * len(form.given)
            _, owners = made.planned
            if owners:
                results = made.operator(*present, *ctx.saved_tensors)
                results = results if isinstance(results, tuple) else (results,)
                for place, one in zip(owners, results, strict=True):
                    found[place] = one
            return tuple(found)

    return OpaqueFunction


def _operator(
    form: CallForm, part: str, count: int, made: Sequence[StridedLayout], kernel: Any
) -> Any:
    """Define an operator of `count` tensors, under a name that a later process gives it again."""
    name = re.sub(r"\W+", "_", form.function.__qualname__).strip("_")
    text = repr((form.shown, form.key, part, made)).encode()
    digest = hashlib.sha256(text).hexdigest()[:12]
    base = "_".join(filter(None, (name, part))) + f"_f{digest}"
    with _lock:
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

    return define(schema, kernel, described, _RUNS_ONCE, OPAQUE)


def _packed(results: list[Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _sets_up_apart(function: Function) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def _in_order(function: Function, operands: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Return a call's operands in the order of the function's forward."""
    if not named:
        return list(operands)
    context = () if _sets_up_apart(function) else (None,)
    bound = inspect.signature(function.forward).bind(*context, *operands, **named)
    bound.apply_defaults()
    return list(bound.args[len(context) :])
