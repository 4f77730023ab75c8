"""Traces a model by dynamo: its graph, its dependencies, and the forward's side effects."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node

from memopt.capture.as_eager.assigned_data import write_assigned_data
from memopt.capture.as_eager.compiling import traced_as_eager
from memopt.capture.as_eager.corrections import tracing_as_eager, with_one_sequence
from memopt.capture.as_eager.layouts import computing_device, layouts_of_kernels
from memopt.capture.as_eager.masks import with_whole_masks
from memopt.capture.as_eager.recorded_outputs import hooks_set
from memopt.capture.as_eager.settled import settles
from memopt.capture.checkpointed_calls import checkpoints_as_called
from memopt.capture.ctc_losses import ctc_losses_whole
from memopt.capture.inner_gradients import check_inner_gradients
from memopt.capture.known_attributes import check_attributes_set, known_attributes
from memopt.capture.lean_trace import lean_trace, real_values_uncopied
from memopt.capture.opaque_calls import declare_opaque, opaque_calls, refusal_in, untraceable
from memopt.capture.regions import alike, forwards_of_blocks, write_out
from memopt.capture.uncaptured import (
    check_numpy,
    check_settings,
    lasting_changes,
    names_of_modules,
    python_name,
    why_not_captured,
    why_not_taken,
)
from memopt.capture.underived import COUNTED
from memopt.capture.usual_branches import (
    branches_as_usual,
    is_looking,
    looks_at_values,
    refuses_values,
)
from memopt.errors import CaptureError
from memopt.models.garbage import cycles_left
from memopt.step.changes import RETURNS_ARRAY, Change, Traced, expression_of, is_of_number
from memopt.step.dependencies import EFFECTS, Dependencies, digest
from memopt.step.dynamo_guards import TraceGuards, guards_heard
from memopt.step.input_values import VALUES
from memopt.step.inputs import Call
from memopt.step.nodes import has_checkpoints
from memopt.step.reader import TraceReader
from memopt.step.side_effects import (
    NO_EFFECTS,
    SideEffects,
    side_effects,
    why_not_left_behind,
)
from memopt.step.traced_arguments import arguments_compared, values_returned
from memopt.step.unheard import unheard
from memopt.torch_private.divergences import with_divergences
from memopt.torch_private.dynamo import (
    capture_errors,
    constant_in_traces,
    failing_modules_heard,
    graph_of,
    own_lists_given,
)
from memopt.torch_private.modules import quantizers_traced
from memopt.torch_private.numbers_of_tensors import kept_in_tensors
from memopt.torch_private.numpy_numbers import with_numbers
from memopt.torch_private.pytree import tree_leaves
from memopt.torch_private.regions import Reused, has_regions, traced_once
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME
from memopt.user_code.left_out import leaving_out_words
from memopt.user_code.restored_state import (
    forward_restored,
    lets_tensors_train,
    libraries_ready,
)

Trace: TypeAlias = tuple[GraphModule, Dependencies]
_COUNTERS: ContextVar[frozenset[Change]] = ContextVar("counters", default=frozenset())
"""Changes of numbers that each call makes anew."""


def trace_of(model: nn.Module, call: Call, to_be_run: bool = True) -> Trace:
    """Return a model's graph, which computes what eager does, and the graph's dependencies. Call it
    inside `tracing_as_eager`.

    Args:
        model, call: the model to trace, and its call.
        to_be_run: whether the forward's side effects matter.

    Raises:
        CaptureError: the model cannot be traced, or a planned step could not repeat the forward's
            side effects.
    """
    return traced_as_eager(model, call, lambda: _trace(model, call, to_be_run))


def traced_again(
    model: nn.Module, call: Call, device: torch.device | None, trace: str
) -> Dependencies | None:
    """Return the dependencies of a new trace of the model; None if its graph is not `trace`."""
    with tracing_as_eager(device), lean_trace():
        traced, dependencies = trace_of(model, call)
    return dependencies if digest(traced, model, dependencies) == trace else None


def effects_of(traced: GraphModule) -> SideEffects:
    """Return the forward's side effects. If the graph returns values for them, it returns a pair:
    the model's output and these values."""
    found: SideEffects = traced.meta.get(EFFECTS, NO_EFFECTS)
    return found


def _trace(model: nn.Module, call: Call, to_be_run: bool) -> Trace:
    with arguments_compared(call):
        module, guards = _dynamo_trace(model, call)
    check_settings(module)
    guards = lasting_changes(model, call, module, guards)
    if not guards.changes or not to_be_run:
        return module, Dependencies.of(model, guards, call)
    settled = _settled(model, call, module, guards)
    if settled is not None:
        return settled
    reader = TraceReader(model, guards)
    try:
        effects = side_effects(model, call, reader)
    except CaptureError as error:
        return _with_counters(model, call, to_be_run, reader.made_of_their_last(), error)
    if effects.made_by_call:
        try:
            with values_returned(effects.places(model, call)):
                module, after = _dynamo_trace(model, call)
        except CaptureError as error:
            if RETURNS_ARRAY in str(error):
                raise
            raise CaptureError(why_not_left_behind(effects.shown)) from error
        if len(after.values) > len(guards.values):  # what is left behind is known now
            return _trace(model, call, to_be_run)
        # It reads what it returns, too: an item that stays in a list, at another place of it.
        guards = replace(after, changes=guards.changes)
    others = effects.other_constants(model, call)
    if others and not _is_built_once(model, call):
        refused = CaptureError(why_not_left_behind(effects.shown))
        return _with_counters(model, call, to_be_run, filter(is_of_number, others), refused)
    module.meta[EFFECTS] = effects
    dependencies = Dependencies.of(model, guards, call)
    if _reads_late(module, dependencies, guards):
        raise CaptureError(why_not_left_behind(effects.shown))
    return module, dependencies


def _with_counters(
    model: nn.Module,
    call: Call,
    to_be_run: bool,
    counters: Iterable[Change],
    refused: CaptureError,
) -> Trace:
    """Return the trace of a model, with these numbers, which each call changes, in tensors.

    Raises:
        CaptureError: `refused`; it cannot be traced so, either.
    """
    known = _COUNTERS.get()
    found = {replace(one, values=()) for one in counters} - known
    if not found:
        raise refused
    before = _COUNTERS.set(known | found)
    try:
        traced, dependencies = _trace(model, call, to_be_run)
    except (CaptureError, RuntimeError, AttributeError) as error:  # the last in torch 2.11
        raise refused from error
    finally:
        _COUNTERS.reset(before)
    traced.meta[COUNTED] = str(refused)
    return traced, dependencies


def _is_counter(source: Any) -> bool:
    return any(one.in_its_place(expression_of(source)) for one in _COUNTERS.get())


def _is_built_once(model: nn.Module, call: Call) -> bool:
    """Return whether a second call would set no other constants than the first, as where that
    builds a cache: the call after it has a plan of its own."""
    with forward_restored(model, call), arguments_compared(call):
        later, after = _dynamo_trace(model, call)
        after = lasting_changes(model, call, later, after)
        again = side_effects(model, call, TraceReader(model, after))
        late = _reads_late(later, Dependencies.of(model, after, call), after)
        return not late and not again.other_constants(model, call)


def _reads_late(module: GraphModule, dependencies: Dependencies, guards: TraceGuards) -> bool:
    """Return whether eager's backward may read a number that the forward changes meanwhile."""
    late = dependencies.late(has_checkpoints(module))
    return any(map(late.may_read, guards.numbers))


def _digest(module: GraphModule, model: nn.Module, call: Call, guards: TraceGuards) -> str:
    return digest(module, model, Dependencies.of(model, guards, call))


def _settled(
    model: nn.Module, call: Call, module: GraphModule, guards: TraceGuards
) -> Trace | None:
    """Return the trace of a model whose attributes keep what a first call sets; None if not."""
    if any(isinstance(value, Traced) for one in guards.changes for value in one.values):
        return None  # other inputs have other values
    names = dict.fromkeys(python_name(one.source) for one in guards.changes)
    found: Trace | None = None

    def unchanged() -> bool:
        nonlocal found
        later, after = _dynamo_trace(model, call)
        found = later, Dependencies.of(model, after, call)
        if digest(later, model, found[1]) != _digest(module, model, call, guards):
            return False
        # Another kind of call may set them otherwise in between.
        after = lasting_changes(model, call, later, after)
        effects = side_effects(model, call, TraceReader(model, after))
        later.meta[EFFECTS] = effects
        return effects.are_constant

    return found if settles(model, call, names, unchanged) else None


def dynamo_capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, TraceGuards]:
    """Return dynamo's graph of the whole model, which shares the model's parameters, and its
    guards: what the trace read of other Python objects, and the forward's changes to them, which
    the graph omits."""
    libraries_ready()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        import memopt.capture.differentiable_collectives  # noqa: F401 (registers what dynamo traces)
    blocks = None
    with suppress(Exception):
        whole = is_looking(model) or not has_regions()
        blocks = None if whole else forwards_of_blocks(model)
    if blocks:
        try:
            return _captured(model, args, kwargs, traced_once(blocks, alike))
        except Exception as error:  # the trace of all blocks says what is wrong, if anything is
            if isinstance(error, capture_errors()) and refuses_values(error):
                raise
    return _captured(model, args, kwargs, nullcontext(Reused()))


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    once: AbstractContextManager[Reused],
) -> tuple[Any, TraceGuards]:
    with (
        ONE_TRACE_AT_A_TIME,
        checkpoints_as_called(written_out=is_looking(model)),
        known_attributes() as attributes_set,
        own_lists_given(),
        quantizers_traced(),
        once as reused,
        guards_heard(reused) as heard,
        real_values_uncopied(),
        unheard(),
    ):
        try:
            module = graph_of(model, args, kwargs)
        except Exception as error:
            cycles_left()
            # Beside some errors Dynamo writes out its graph, which fails for one without a node.
            told = error.__context__ if isinstance(error, SyntaxError) else None
            if isinstance(told, capture_errors()):
                raise told from None
            raise
    check_attributes_set(module, attributes_set)
    write_assigned_data(module)
    write_out(module)
    return module, heard()


def _dynamo_trace(model: nn.Module, call: Call) -> tuple[GraphModule, TraceGuards]:
    """Return dynamo's graph of a call, traced as eager runs it, and the trace's guards."""

    failing, before = list[str](), sys.exception()
    numbers = dict[str, torch.Tensor]()

    def trace() -> Any:
        # A model that asks for strides gets those of its kernels.
        with (
            layouts_of_kernels(computing_device(model, call)),
            leaving_out_words(),
            ctc_losses_whole(),
            _sharing_known(),
            opaque_calls() as incomplete,
            failing_modules_heard() as failing_here,
            branches_as_usual(model, call) as note,
            kept_in_tensors(_is_counter) as numbers_here,
        ):
            nonlocal failing, numbers
            failing, numbers = failing_here, numbers_here
            found = with_numbers(
                lambda: with_divergences(lambda: dynamo_capture(model, *call.opened))
            )
            again = incomplete(found[0]) or note(found[0])
        return trace() if again else found

    try:
        found: tuple[GraphModule, TraceGuards] = with_one_sequence(
            lambda: with_whole_masks(model, call, trace)
        )
    except capture_errors() as error:
        refusal, function = refusal_in(error, before), untraceable(error)
        if refusal is not None:
            raise refusal from error
        if function is not None:
            declare_opaque(function)
        again = function is not None or hooks_set(model, call, error)
        again = again or lets_tensors_train(model, call, error)
        if again or looks_at_values(model, error):
            return _dynamo_trace(model, call)
        own = {name for name, _ in model.named_modules(remove_duplicate=False)}
        inside = tuple(name for name in names_of_modules(failing) if name in own)
        refused = CaptureError(why_not_captured(model, call, error, inside))
        refused.modules = inside
        raise refused from error
    except AssertionError as error:
        raise CaptureError(why_not_taken(model, call, error)) from error
    except NotImplementedError as error:
        if any(words in str(error) for words in ("argument of type", "is not a constant")):
            raise CaptureError(why_not_captured(model, call, error)) from error
        # Dynamo has no message of its own for an object that the forward makes and leaves behind.
        if "TempLocalSource" in str(error):
            raise CaptureError(why_not_left_behind(["an object that it makes"])) from error
        raise _failed_in_dynamo(error) from error
    except (TypeError, AttributeError, LookupError) as error:
        raise _failed_in_dynamo(error) from error
    check_numpy(found[0])
    check_inner_gradients(found[0])
    _check_code(found[0])
    return found[0], replace(found[1], values=found[0].meta.get(VALUES, ()), numbers=numbers)


def _sharing_known() -> AbstractContextManager[Any]:
    """Return a context in which a trace knows whether opt_einsum shares results of products in this
    thread (neuraloperator asks): a planned step shares none, and computes the same."""
    asked = getattr(sys.modules.get("opt_einsum.sharing"), "currently_sharing", None)
    return nullcontext() if asked is None else constant_in_traces(asked)


_WRITTEN = (Node, type(None), bool, int, float, complex, str)


def _check_code(module: GraphModule) -> None:
    """Refuse a graph whose code cannot be written: torch writes an object as its `repr`.

    Raises:
        CaptureError: it cannot.
    """
    returned: Any = module.graph.output_node().args
    if all(isinstance(one, _WRITTEN) for one in tree_leaves(returned)):
        return  # writing the code of a large graph takes long
    try:
        str(module.code)
    except SyntaxError as error:
        raise CaptureError(
            "the model returns an object of Python beside its tensors, such as a function, of "
            "which no graph can be written: leave it out of what it returns, or plan the "
            'sub-modules (parts="auto" of memopt.wrap)'
        ) from error


def _failed_in_dynamo(error: Exception) -> CaptureError:
    """Return the refusal of a model on which dynamo's own code fails.

    Raises:
        Exception: the error itself, if other code has raised it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # What a guard reads is evaluated as text.
    own = frames[-2] if frames[-1].f_code.co_filename == "<string>" else frames[-1]
    module = f"{own.f_globals.get('__name__')}."
    if not module.startswith(("torch._dynamo.", "torch._guards.")):
        raise error
    return CaptureError(
        f"torch's tracer fails on the model with {type(error).__name__}: {error}. Plan its "
        'sub-modules (parts="auto" of memopt.wrap)'
    )
