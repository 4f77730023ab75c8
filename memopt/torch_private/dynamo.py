"""Dynamo: tracing a whole model as one graph, and the patches for that."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from memopt.torch_private.access import attribute_name, known, missing, optional, patched, private
from memopt.torch_private.inner_gradients import gradients_traced, makers_of_leaves
from memopt.torch_private.instructions import objects_asserted
from memopt.torch_private.numbers_of_tensors import readers_of_numbers
from memopt.torch_private.rows import TABLE
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME, POOLED, kernels_kept_whole

_EXPORT = "torch._dynamo.functional_export"
_TRACED = "torch._dynamo.convert_frame.get_traced_fn"
_VARIABLES = "torch._dynamo.variables"
_HANDLERS = f"{_VARIABLES}.torch.TorchInGraphFunctionVariable._get_handlers"
_INSIDE = f"{_VARIABLES}.UserDefinedObjectVariable._base_vt"
_MERGED = f"{_VARIABLES}.base.ValueAndAttributeMutationExisting"
"""Marks objects whose variable has the items itself, since torch 2.15."""
_LIST = f"{_VARIABLES}.user_defined.UserDefinedListVariable.as_proxy"
_CHANGED = (
    f"{_VARIABLES}.base.AttributeMutationExisting",
    f"{_VARIABLES}.base.ValueMutationExisting",
    f"{_VARIABLES}.ConstDictVariable",
    f"{_VARIABLES}.DeletedVariable",
    f"{_VARIABLES}.lists.DequeVariable",
    f"{_VARIABLES}.ListVariable",
    f"{_VARIABLES}.NumpyNdarrayVariable",
    f"{_VARIABLES}.SetVariable",
    f"{_VARIABLES}.SymNodeVariable",
    f"{_VARIABLES}.TensorVariable",
    f"{_VARIABLES}.torch_function.TorchFunctionModeStackVariable",
)

_in_capture = False


def captured_around() -> bool:
    """Whether the caller is traced by memopt's capture; False in everything that runs, also in
    other threads meanwhile, since Dynamo answers `is_dynamo_compiling` while it traces."""
    return torch.compiler.is_dynamo_compiling() and _in_capture


def graph_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace the whole model as one FX graph, which shares the model's parameters."""
    global _in_capture
    capture = private(f"{_EXPORT}._dynamo_graph_capture_for_export")
    wanted = {
        "allow_rnn": True,
        "side_effect_replay_policy": "silent",
        # Else addcmul_ and the like become a product and a fused multiply-add: other bits.
        "enable_dynamo_decompositions": False,
    }
    for name in wanted:
        private(f"torch._dynamo.config.{name}")
    export_root()  # the expressions name it
    config: Any = importlib.import_module("torch._dynamo.config")
    with (
        config.patch(wanted),
        kernels_kept_whole(),
        gradients_traced(),
        _not_exporting(),
        # Dynamo decomposes addcdiv with a factor whatever its settings: the quotient, product and
        # sum round otherwise.
        handlers_replaced({torch.addcdiv: None}),
        handlers_replaced(POOLED),
        handlers_replaced(readers_of_numbers(handlers())),
        handlers_replaced(makers_of_leaves(handlers())),
        _no_hooks_around(),
        objects_asserted(),
    ):
        _in_capture = True
        try:
            return capture(model)(*args, **kwargs)
        finally:
            _in_capture = False
            # Compiled functions, which memopt never runs, would keep the model's parameters alive.
            namespace = vars(importlib.import_module(_EXPORT))
            for name in [name for name in namespace if name.startswith("__compiled_fn_")]:
                del namespace[name]


@contextlib.contextmanager
def _no_hooks_around() -> Iterator[None]:
    """Trace no hooks on the module that torch puts around the model: the hooks on all modules would
    run on it, too."""
    traced = private(_TRACED)

    def found(module: Any) -> Any:
        is_around = hasattr(module, export_root())
        return (type(module).forward, module) if is_around else traced(module)

    with patched(_TRACED, found):
        yield


def export_root() -> str:
    """Return the attribute by which a traced frame has the model."""
    return attribute_name(f"{_EXPORT}.ModuleToTrace._export_root")


def handlers() -> dict[Any, Any]:
    """Return Dynamo's handlers of functions that it puts into its graph."""
    found: dict[Any, Any] = private(_HANDLERS)()
    return found


@contextlib.contextmanager
def handlers_replaced(replacing: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Trace with other handlers of functions; None removes a handler."""
    known_handlers = handlers()
    with ONE_TRACE_AT_A_TIME:
        kept = {one: known_handlers[one] for one in replacing if one in known_handlers}
        try:
            for function, handler in replacing.items():
                if handler is None:
                    known_handlers.pop(function, None)
                else:
                    known_handlers[function] = handler
            yield
        finally:
            for one in replacing:
                known_handlers.pop(one, None)
            known_handlers.update(kept)


@contextlib.contextmanager
def custom_functions_heard(
    failed: Callable[[Any, BaseException], None],
) -> Iterator[list[Any]]:
    """Call `failed` with each custom function in whose code Dynamo fails, the innermost first, and
    the exception.

    Returns: a list of the custom functions that are traced.
    """
    name = f"{_VARIABLES}.misc.AutogradFunctionVariable.call_apply"
    call_apply = private(name)
    traced: list[Any] = []

    def heard(variable: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(variable.fn_cls)
        try:
            return call_apply(variable, *args, **kwargs)
        except Exception as error:
            failed(variable.fn_cls, error)
            raise

    with patched(name, heard):
        yield traced


@contextlib.contextmanager
def failing_modules_heard() -> Iterator[list[str]]:
    """Return a list that, once Dynamo has failed, has Dynamo's names of the modules in whose code
    it did, the innermost first."""
    name = f"{_VARIABLES}.nn_module.record_nn_module_stack"
    record, left = optional(name), list[str]()
    if record is None:
        yield left
        return

    @contextlib.contextmanager
    def recorded(key: Any, source: Any, *args: Any) -> Iterator[None]:
        left.clear()  # Dynamo goes on after errors that the traced code handles
        try:
            with record(key, source, *args):
                yield
        except Exception:
            left.append(str(source.name))
            raise

    with patched(name, recorded):
        yield left


@contextlib.contextmanager
def taken_whole(functions: Iterable[Any]) -> Iterator[None]:
    """Let Dynamo put calls of these into its graph, without tracing their code."""
    allowed = private("torch._dynamo.trace_rules._allowed_callable_ids")
    new = [id(one) for one in functions if id(one) not in allowed]
    with ONE_TRACE_AT_A_TIME:
        for one in new:
            allowed.add(one)
        try:
            yield
        finally:
            for one in new:
                allowed.remove(one)


def asks_whether_compiled() -> dict[Any, Callable[..., Any]]:
    """Return the functions that tell code whether it is compiled, and Dynamo's handlers of them.

    Raises:
        CaptureError: Dynamo has no handler of one of them.
    """
    handlers: dict[Any, Callable[..., Any]] = private(_HANDLERS)()
    asked = (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        private("torch._utils.is_compiling"),
        private("torch._dynamo.external_utils.is_compiling"),
    )
    if not all(one in handlers for one in asked):
        raise missing(TABLE[_HANDLERS])
    return {one: handlers[one] for one in asked}


class _TrueInThisThread:
    """True in the thread that makes it, False in all others."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread


@contextlib.contextmanager
def _not_exporting() -> Iterator[None]:
    """Make `torch.compiler.is_exporting()` False while Dynamo traces, since the step is only run.
    Models ask for it: Hugging Face's exported attention has a mask in place of `is_causal`, and
    keys and values repeated for every head. `is_compiling()` is True in this thread alone: torch's
    flag is the process's, and in other threads optimizers that see it round otherwise."""
    name = f"{_EXPORT}._compiling_state_context"
    states = private(f"{_VARIABLES}.torch.tracing_state_functions")()
    private("torch.compiler._is_exporting_flag")
    question, entered = torch.compiler.is_exporting, private(name)
    if question not in states:
        raise missing(TABLE[f"{_VARIABLES}.torch.tracing_state_functions"])

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        in_this_thread = patched("torch.compiler._is_compiling_flag", _TrueInThisThread())
        with entered(), in_this_thread:  # the first restores the flag
            torch.compiler._is_exporting_flag = False
            yield

    with ONE_TRACE_AT_A_TIME, patched(name, compiling):
        answer = states[question]
        try:
            states[question] = False
            yield
        finally:
            states[question] = answer


@contextlib.contextmanager
def compiled_code_kept() -> Iterator[None]:
    """Capture without resetting Dynamo, whose compiled code the caller is a part of."""
    with ONE_TRACE_AT_A_TIME, patched("torch._dynamo.reset", lambda: None):
        yield


def comptime() -> Any:
    """Return Dynamo's function `comptime`. In traced code it calls its argument, during the trace,
    with the context of the trace."""
    return private("torch._dynamo.comptime.comptime")


def capture_errors() -> tuple[type[Exception], ...]:
    """Return the classes of Dynamo's errors, and of errors about values that a trace does not
    have."""
    return (
        private("torch._dynamo.exc.TorchDynamoException"),
        private("torch.fx.experimental.symbolic_shapes.PendingUnbackedSymbolNotFound"),
        private("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode"),
    )


def constant(value: object) -> Any:
    """Make a constant for Dynamo's trace."""
    return private(f"{_VARIABLES}.constant.ConstantVariable").create(value)


@contextlib.contextmanager
def functions_ignored(functions: Iterable[Any]) -> Iterator[None]:
    """Have Dynamo also leave out calls of these functions inside."""
    ignored = {*functions, *private("torch._dynamo.config.ignore_logging_functions")}
    config: Any = importlib.import_module("torch._dynamo.config")
    # torch 2.11 writes its settings into a log, which functions cannot be.
    quiet = patched("torch._dynamo.utils._get_dynamo_config_for_logging", lambda: None)
    with config.patch(ignore_logging_functions=ignored), quiet:
        yield


def constant_in_traces(function: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Dynamo calls a function while tracing, and inlines its result."""
    name = attribute_name("torch._dynamo._dynamo_marked_constant")
    return mock.patch.object(function, name, True, create=True)


def variables(*names: str) -> tuple[Any, ...]:
    """Return classes of Dynamo's variables by their names."""
    return tuple(private(f"{_VARIABLES}.{name}") for name in names)


@contextlib.contextmanager
def own_lists_given() -> Iterator[None]:
    """Trace inside with the user's own list classes accepted by operators (Keras keeps axes in such
    lists), if this torch allows it."""

    def given(variable: Any) -> list[Any]:
        inner = container_inside(variable)
        return [one.as_proxy() for one in (variable if inner is None else inner).items]

    if not (known(_LIST) and (known(_MERGED) or known(_INSIDE))):
        yield
        return
    with patched(_LIST, given):
        yield


def guard_helpers() -> Mapping[str, Any]:
    """Return the helper functions that guard expressions call."""
    helpers: Mapping[str, Any] = private("torch._dynamo.guards._get_closure_vars")()
    return helpers


@contextlib.contextmanager
def shapes_compared_if(varies: Callable[[], bool]) -> Iterator[None]:
    """Trace so that guards are compared with the declared shapes, for which they are compiled, only
    if `varies()`."""
    name = f"{_EXPORT}._suggest_or_raise_constraint_violation"
    compare = optional(name)
    if compare is None:
        yield
        return

    def compared(*args: Any, **kwargs: Any) -> None:
        if varies():
            compare(*args, **kwargs)

    with patched(name, compared):
        yield


@contextlib.contextmanager
def updates_heard(hear: Callable[[Any], None]) -> Iterator[None]:
    """Trace, and call `hear(side effects)` before Dynamo writes the code that replays them.

    Raises:
        CaptureError: this torch lacks a class of variables that memopt knows by name.
    """
    name = "torch._dynamo.side_effects.SideEffects.codegen_update_mutated"
    for kind in _CHANGED:
        private(kind)
    emit = private(name)

    def listening(effects: Any, *args: Any, **kwargs: Any) -> Any:
        hear(effects)
        return emit(effects, *args, **kwargs)

    with patched(name, listening):
        yield


def modified(effects: Any) -> Any:
    """Return Dynamo's variables that a trace modifies."""
    private("torch._dynamo.side_effects.SideEffects._get_modified_vars")
    return effects._get_modified_vars()


def container_inside(variable: Any) -> Any:
    """Return Dynamo's variable of the items in a container object; None for other objects, and
    where the object's own variable has them."""
    return None if known(_MERGED) or not known(_INSIDE) else getattr(variable, "_base_vt", None)


def visit(look: Callable[[Any], None], variable: Any) -> None:
    """Call `look` with one of Dynamo's variables and with all its parts."""
    private(f"{_VARIABLES}.base.VariableTracker.visit")(look, variable)


@contextlib.contextmanager
def frame_replaced(
    make: Callable[[Any, dict[str, Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Trace another frame around a model: `make(the frame's class, its module's globals)`."""
    attribute_name(f"{_EXPORT}.ModuleToTrace.in_spec")
    for name in ("ExportTracerOutput", "pytree"):  # read by the frames
        private(f"{_EXPORT}.{name}")
    name = f"{_EXPORT}.ModuleToTrace"
    made = make(private(name), vars(importlib.import_module(_EXPORT)))
    with patched(name, made):
        yield
