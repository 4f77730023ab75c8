"""The private torch names memopt relies on, in one place, for torch 2.11 to 2.13.

Each function says what is missing when a torch version has moved its name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from memopt.errors import CaptureError
from memopt.models.locks import ForkedLock
from memopt.profiler.checkpointed_calls import checkpoints_as_called
from memopt.profiler.dependencies.dynamo_guards import TraceGuards, guards_heard
from memopt.profiler.real_values import real_values_uncopied

_MOVED = (
    "this torch ({version}) has no {name}, which memopt needs; memopt supports torch 2.11 to 2.13"
)


def imported(module: str, name: str) -> Any:
    """A private name of torch's.

    Raises:
        CaptureError: this torch does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = _MOVED.format(version=torch.__version__, name=f"{module}.{name}")
        raise CaptureError(message) from error


_imported_once = functools.cache(imported)

_FUNCTIONAL_TENSOR = ("torch._subclasses.functional_tensor", "FunctionalTensor")


def profiler_looks_on() -> bool:
    """Whether torch's profiler records what this thread does."""
    return bool(_imported_once("torch.autograd", "_profiler_enabled")())


def grouped_by_dtype(tensors: list[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors of one device by their dtype, the groups in the order in which
    `torch.nn.utils.clip_grad_norm_` takes them."""
    grouped = imported("torch.utils._foreach_utils", "_group_tensors_by_device_and_dtype")
    return [list(indices) for _, indices in grouped([tensors], with_indices=True).values()]


def give_back_workspaces() -> None:
    """Let cuBLAS return its workspaces, of all threads and streams, to torch's CUDA allocator."""
    imported("torch._C", "_cuda_clearCublasWorkspaces")()


def autograd_in_kernels() -> contextlib.AbstractContextManager[None]:
    """Context in which operators called from a kernel have autograd, also where a dispatch mode
    has switched it off below itself."""
    native: Any = torch._C
    excluded = native._dispatch_tls_local_exclude_set()
    for name, key in vars(native.DispatchKey).items():
        if (name.startswith("Autograd") or name == "ADInplaceOrView") and excluded.has(key):
            excluded = excluded.remove(key)
    included = native._dispatch_tls_local_include_set()
    guard: contextlib.AbstractContextManager[None] = native._ForceDispatchKeyGuard(
        included, excluded
    )
    return guard


_in_capture = False


def captured_around() -> bool:
    """True in what memopt's capture traces, and False in everything that runs, meanwhile in other
    threads, too: dynamo answers the first question itself."""
    return torch.compiler.is_dynamo_compiling() and _in_capture


def shape_from_data_error() -> type[Exception]:
    """Dynamo's error where it loses track of a shape that depends on values."""
    error: type[Exception] = imported(
        "torch.fx.experimental.symbolic_shapes", "PendingUnbackedSymbolNotFound"
    )
    return error


def dynamo_capture(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, TraceGuards]:
    """One FX graph of the whole model by dynamo, sharing the model's parameters; and what the trace
    read of other Python objects, and what of them the forward changes, which the graph will not."""
    capture = imported("torch._dynamo.functional_export", "_dynamo_graph_capture_for_export")
    import torch._dynamo.config as config

    wanted = {
        "allow_rnn": True,
        "side_effect_replay_policy": "silent",
        # addcmul_ and the like would be traced as a product and a fused multiply-add: other bits.
        "enable_dynamo_decompositions": False,
    }
    patch = config.patch({name: value for name, value in wanted.items() if hasattr(config, name)})
    with (
        patch,
        kernels_kept_whole(),
        checkpoints_as_called(),
        _not_exporting(),
        guards_heard() as heard,
        _calls_kept_whole(),
        real_values_uncopied(),
    ):
        global _in_capture
        _in_capture = True
        try:
            module = capture(model)(*args, **kwargs)
        finally:
            _in_capture = False
            _forget_compiled()
    return module, heard()


@contextlib.contextmanager
def _not_exporting() -> Iterator[None]:
    """`torch.compiler.is_exporting()` is False in what dynamo traces: the step is run, not shipped.
    Models ask for it: Hugging Face's exported attention has a mask in place of `is_causal`, and
    keys and values repeated for every head."""
    home = importlib.import_module("torch._dynamo.functional_export")
    states = imported("torch._dynamo.variables.torch", "tracing_state_functions")()
    question = torch.compiler.is_exporting
    entered, answer = getattr(home, "_compiling_state_context", None), states.get(question)

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        assert entered is not None
        with entered():  # which puts the flag back
            torch.compiler._is_exporting_flag = False
            yield

    with ONE_TRACE_AT_A_TIME:
        try:
            if entered is not None:
                home._compiling_state_context = compiling  # type: ignore[attr-defined]
            if answer is not None:
                states[question] = False
            yield
        finally:
            if entered is not None:
                home._compiling_state_context = entered  # type: ignore[attr-defined]
            if answer is not None:
                states[question] = answer


@contextlib.contextmanager
def _calls_kept_whole() -> Iterator[None]:
    """Without what dynamo itself takes apart whatever it is told: addcdiv with a factor becomes
    a quotient, a product and a sum, which round otherwise."""
    variable = imported("torch._dynamo.variables.torch", "TorchInGraphFunctionVariable")
    handlers: dict[Any, Any] = getattr(variable, "_get_handlers", dict)()
    with ONE_TRACE_AT_A_TIME:
        taken = handlers.pop(torch.addcdiv, None)
        try:
            yield
        finally:
            if taken is not None:
                handlers[torch.addcdiv] = taken


@contextlib.contextmanager
def compiled_code_kept() -> Iterator[None]:
    """Capture without dynamo forgetting all that it has compiled, of which the caller is a part."""
    with ONE_TRACE_AT_A_TIME, mock.patch.object(torch._dynamo, "reset"):
        yield


def _forget_compiled() -> None:
    """Dynamo leaves the compiled function, and with it the model's parameters, in the globals of
    the module that it traced from; memopt never runs it."""
    namespace = vars(importlib.import_module("torch._dynamo.functional_export"))
    for name in [name for name in namespace if name.startswith("__compiled_fn_")]:
        del namespace[name]


def export_joint(
    stack: contextlib.ExitStack, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The joint forward+backward ATen graph with descriptors, without decompositions.

    What torch remembers of fake results says nothing of one tensor that is returned twice (an
    LSTM's gradients of its biases): a graph would depend on what was traced before it.
    """
    imported("torch._subclasses.fake_tensor", "FakeTensorMode").cache_clear()
    export = imported("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")
    stack.enter_context(kernels_kept_whole())
    return export(stack, module, args, kwargs)


# Operators that eager runs as one kernel, and that torch takes apart in Python while it traces:
# other bits (interpolation, shrinking), more memory, or another result (the dropout between the
# layers of an LSTM is lost, torch.nn.MultiLabelMarginLoss is wrong).
_TAKEN_APART = (
    *(
        f"upsample_{kind}.{form}"
        for kind in (
            "nearest1d",
            "nearest2d",
            "nearest3d",
            "linear1d",
            "bilinear2d",
            "bicubic2d",
            "trilinear3d",
        )
        for form in ("default", "vec")
    ),
    *(f"_upsample_nearest_exact{n}d.{form}" for n in (1, 2, 3) for form in ("default", "vec")),
    "_upsample_bilinear2d_aa.vec",
    "_upsample_bicubic2d_aa.vec",
    "_upsample_lanczos2d_aa.vec",
    "hardshrink.default",
    "softshrink.default",
    "matmul.default",
    "multi_margin_loss.default",
    "multilabel_margin_loss_forward.default",
    *(
        f"{kind}.{form}"
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for form in ("input", "data")
    ),
)


ONE_TRACE_AT_A_TIME = ForkedLock()


@contextlib.contextmanager
def kernels_kept_whole() -> Iterator[None]:
    """Trace with the operators that eager runs, not with Python decompositions of them."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    found = [
        getattr(getattr(torch.ops.aten, packet, None), form, None)  # not every torch has all
        for packet, _, form in (name.partition(".") for name in _TAKEN_APART)
    ]
    dropout = torch.ops.aten.dropout.default
    overloads = [dropout, *(overload for overload in found if overload is not None)]
    with ONE_TRACE_AT_A_TIME:
        kept = [dict(overload.py_kernels) for overload in overloads]
        try:
            for overload in overloads:
                for key in keys:
                    whole = overload.py_kernels.pop(key, None)
                    if overload is dropout and whole is not None:
                        overload.py_kernels[key] = _itself_or(whole)
                overload._dispatch_cache.clear()
            yield
        finally:
            for overload, kernels in zip(overloads, kept, strict=True):
                overload.py_kernels.update(kernels)
                overload._dispatch_cache.clear()


def _itself_or(dropout: Callable[..., Any]) -> Callable[..., Any]:
    """A dropout that drops nothing returns what it is given, as the real one does; torch's
    decomposition returns a row-major copy: memory, other strides, and no update in place."""

    def kernel(given: torch.Tensor, p: float, train: bool | None) -> Any:
        return dropout(given, p, train) if train and p != 0 and given.numel() else given

    return kernel


def compile_joint(
    joint: Any,
    partition: Callable[..., Any],
    forward_compiler: Callable[..., Any],
    backward_compiler: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap our own forward and backward callables in AOTAutograd's runtime."""
    compile_ = imported("torch._functorch.aot_autograd", "aot_compile_joint_with_descriptors")
    with contextlib.suppress(AttributeError):
        # It would write the joint graph down for its log, whether or not anyone keeps one.
        joint._aot_state.aot_config.enable_log = False
    # AOTAutograd writes one long expression over all parameters, and Python's compiler recurses
    # into it: the default limit stops models of about a thousand layers (ResNet-1001).
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 30_000))
    try:
        compiled: Callable[..., Any] = compile_(
            joint,
            partition_fn=partition,
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
        )
    finally:
        sys.setrecursionlimit(limit)
    return compiled


def descriptor_types() -> Any:
    """The module of AOTAutograd's input and output descriptors."""
    return importlib.import_module("torch._functorch._aot_autograd.descriptors")


def keeps_graph() -> bool:
    """Whether the running backward was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_owns_tangents() -> bool:
    """Whether a compiled backward can drop output gradients early (boxed gradient calls)."""
    return hasattr(torch.autograd.Function, "boxed_grads_call")


@contextlib.contextmanager
def no_donated_buffers(joint: Any) -> Iterator[None]:
    """Compile so that retain_graph=True keeps working: AOTAutograd looks for an empty list of
    donated buffers at run time, and leaves it None if told not to look for any."""
    import torch._functorch.config as config

    try:
        metadata = joint._aot_state.fw_metadata
    except AttributeError as error:
        name = "JointWithDescriptors._aot_state.fw_metadata"
        raise CaptureError(_MOVED.format(version=torch.__version__, name=name)) from error
    metadata.bw_donated_idxs = []
    with config.patch(donated_buffer=False):
        yield


def is_functional(value: Any) -> bool:
    """Whether a value is one of AOTAutograd's tensors, whose updates in place become new values."""
    return isinstance(value, _imported_once(*_FUNCTIONAL_TENSOR))


def as_functional(value: torch.Tensor) -> Any:
    """While AOTAutograd traces: a tensor of its own that has a value which is in the trace."""
    return _imported_once(*_FUNCTIONAL_TENSOR).to_functional(value)


def replace_functional(tensor: Any, value: Any) -> None:
    """While AOTAutograd traces: what an update in place makes of `tensor` is `value`."""
    tensor.replace_(value.from_functional())
    tensor.commit_update()
    tensor.sync()


def has_kernel(overload: Any, dispatch_key: str) -> bool:
    """Whether torch has a kernel of its own for an operator overload on a kind of device, not one
    composed of other operators."""
    find = imported("torch._C", "_dispatch_has_kernel_for_dispatch_key")
    schema = overload._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return bool(find(name, dispatch_key))


def storage_at(address: int, device: torch.device, size_bytes: int) -> torch.UntypedStorage:
    """A storage over memory that somebody else owns and must keep alive."""
    make = imported("torch._C", "_construct_storage_from_data_pointer")
    storage: torch.UntypedStorage = make(address, device, size_bytes)
    return storage


def data_parallel_around() -> Any:
    """The DistributedDataParallel whose forward runs, and calls its module; None: there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    data_parallel = imported("torch.nn.parallel", "DistributedDataParallel")
    active = getattr(data_parallel, "_get_active_ddp_module", None)
    return None if active is None else active()
