"""Calls custom autograd functions by the operators that stand for them in a traced graph."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from memopt.step.operators import RUN_ONCE, Substitute
from memopt.torch_private import pytree
from memopt.user_code.opaque import (
    Autocast,
    Function,
    StridedLayout,
)
from memopt.user_code.opaque_forms import (
    LOCK,
    SHOWN,
    WITH_EFFECTS,
    BackwardForm,
    CallForm,
    Marker,
    sets_up_apart,
)
from memopt.user_code.told_layouts import is_python


@dataclass
class _Known:
    """The forms of a custom function that operators were made for."""

    calls: list[CallForm] = field(default_factory=list)
    functions: dict[int, Any] = field(default_factory=dict)


_known: dict[Function, _Known] = {}


def called(function: Function, *operands: Any, **named: Any) -> Any:
    """Call a custom function by its operators, recorded by autograd."""
    leaves, nest = pytree.tree_flatten(_in_order(function, operands, named))
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    form = CallForm(
        function=function,
        constants=tuple(Marker.TENSOR if isinstance(one, Tensor) else one for one in leaves),
        nest=nest,
        given=tuple(map(StridedLayout.of, tensors)),
        needs=tuple(one.requires_grad for one in tensors),
        autocast=Autocast.now(tensors),
    )
    with LOCK:
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
    found = {name_of(one) for one in targets if one in SHOWN or one in RUN_ONCE}
    if not found:
        return ()
    names = ", ".join(sorted(found))
    return (f"Run as they are, once in a step, since they cannot be traced: {names}.",)


def may_have_effects(target: Any) -> bool:
    """Return whether a call runs a user's Python code that may draw or change something by itself:
    the forward of a custom function, or an operator that has no fake kernel."""
    return target in WITH_EFFECTS or (target in RUN_ONCE and is_python(target))


def name_of(target: Any) -> str:
    """Return the name of code that runs as one operator."""
    return SHOWN.get(target) or str(target.name()).partition(".")[0]


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
            with LOCK:
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


def _in_order(function: Function, operands: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Return a call's operands in the order of the function's forward."""
    if not named:
        return list(operands)
    context = () if sets_up_apart(function) else (None,)
    bound = inspect.signature(function.forward).bind(*context, *operands, **named)
    bound.apply_defaults()
    return list(bound.args[len(context) :])
