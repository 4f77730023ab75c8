"""AOTAutograd and fake tensors: joint graphs of forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx

from memopt.torch_private.access import (
    attribute_name,
    known,
    optional,
    patched,
    private,
    private_once,
    required,
)
from memopt.torch_private.whole_kernels import kernels_kept_whole

with required("torch._subclasses.fake_tensor.FakeTensor"):
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
with required("torch._subclasses.fake_tensor.FakeTensorMode"):
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

_AOT = "torch._functorch._aot_autograd"
_FUNCTIONAL = "torch._subclasses.functional_tensor.FunctionalTensor"
_FUNCTORCH = "torch._C._functorch"
_REFUSED = "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message"
_METADATA = "torch.fx.experimental.proxy_tensor._extract_tensor_metadata"
FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The logger of fake tensors."""


def export_joint(
    stack: contextlib.ExitStack, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Trace the joint forward+backward ATen graph with descriptors, without decompositions.

    torch's cache of fake results forgets that one tensor is returned twice (an LSTM's gradients of
    its biases), so that a graph would depend on earlier traces: the cache is cleared before. If a
    trace fails inside a transform of torch.func, which refuses hooks on saved tensors, it is left.
    """
    depth, message = private(f"{_FUNCTORCH}.maybe_current_level")() or 0, private(_REFUSED)()
    private("torch._subclasses.fake_tensor.FakeTensorMode.cache_clear")()
    export = private("torch._functorch.aot_autograd.aot_export_joint_with_descriptors")
    stack.enter_context(kernels_kept_whole())
    try:
        return export(stack, module, args, kwargs)
    except BaseException:
        private(f"{_FUNCTORCH}.pop_dynamic_layer_stack_and_undo_to_depth")(depth)
        if message is None:
            private("torch._C._autograd._saved_tensors_hooks_enable")()
        raise


def called_alike(graph: Any) -> Any:
    """Make an empty FX graph that takes and returns its values as another does."""
    made = torch.fx.Graph()
    made.set_codegen(getattr(graph, attribute_name("torch.fx.Graph._codegen")))
    return made


def compile_joint(
    joint: Any,
    partition: Callable[..., Any],
    forward_compiler: Callable[..., Any],
    backward_compiler: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap our own forward and backward callables in AOTAutograd's runtime."""
    compile_ = private("torch._functorch.aot_autograd.aot_compile_joint_with_descriptors")
    if optional(f"{_AOT}.schemas.AOTConfig.enable_log") is not None:
        # Else torch formats the joint graph for its log, even if nobody keeps that log.
        state = joint._aot_state
        state.aot_config = dataclasses.replace(state.aot_config, enable_log=False)
    # AOTAutograd writes one long expression over all parameters, and Python's compiler recurses
    # into it: the default limit fails for about a thousand layers (ResNet-1001).
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 30_000))
    unwatched = _unwatched_first_call if _built_in(joint.graph_module) else contextlib.nullcontext
    try:
        with unwatched():
            compiled: Callable[..., Any] = compile_(
                joint,
                partition_fn=partition,
                fw_compiler=forward_compiler,
                bw_compiler=backward_compiler,
            )
    finally:
        sys.setrecursionlimit(limit)
    return compiled


def _built_in(module: torch.fx.GraphModule) -> bool:
    """Whether all operators of a graph are torch's or memopt's own."""
    called = (node.target for node in module.graph.nodes if node.op == "call_function")
    names = {one.namespace for one in called if isinstance(one, torch._ops.OpOverload)}
    return names <= {"aten", "prims", "prim", "_c10d_functional", "memopt"}


@contextlib.contextmanager
def _unwatched_first_call() -> Iterator[None]:
    """Compile without a mode in the first call that looks for results of users' operators that
    share their arguments' memory. Under it every kernel is called through Python."""
    name = f"{_AOT}.runtime_wrappers._FirstInvocationContext"
    if not known(name):
        yield
        return
    is_first = attribute_name(f"{name}._is_first")
    with patched(f"{name}.__init__", lambda self: setattr(self, is_first, False)):
        yield


def descriptor_types() -> Any:
    """Return the module of AOTAutograd's input and output descriptors."""
    return private(f"{_AOT}.descriptors")


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that AOTAutograd calls with a list of arguments; it may empty it."""
    setattr(function, attribute_name(f"{_AOT}.utils._boxed_call"), True)
    return function


def tangent_layouts(joint: Any) -> list[Any]:
    """Return the layouts in which a compiled joint graph takes its outputs' gradients."""
    metadata = getattr(joint._aot_state, attribute_name(f"{_AOT}.schemas.AOTState.fw_metadata"))
    name = attribute_name(f"{_AOT}.schemas.ViewAndMutationMeta.subclass_tangent_meta")
    found: list[Any] = getattr(metadata, name)
    return found


def of_any_size(layouts: list[Any]) -> None:
    """Let a compiled joint graph take gradients of any size, row-major. AOTAutograd would copy them
    into tensors of the size that it was compiled with."""
    made = private(f"{_AOT}.schemas.MemoryFormatMeta")
    name = attribute_name(f"{_AOT}.schemas.PlainTensorMeta.memory_format")
    for layout in layouts:
        setattr(layout, name, made(memory_format=torch.contiguous_format))


@contextlib.contextmanager
def no_donated_buffers(joint: Any) -> Iterator[None]:
    """Compile without donated buffers, so that retain_graph=True works. AOTAutograd then leaves
    their list None, but needs an empty one at run time."""
    metadata = getattr(joint._aot_state, attribute_name(f"{_AOT}.schemas.AOTState.fw_metadata"))
    donated = attribute_name(f"{_AOT}.schemas.ViewAndMutationMeta.bw_donated_idxs")
    setattr(metadata, donated, [])
    with functorch_set(donated_buffer=False):
        yield


def functorch_set(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context with these settings of AOTAutograd."""
    for name in settings:
        private(f"torch._functorch.config.{name}")
    config: Any = importlib.import_module("torch._functorch.config")
    patch: contextlib.AbstractContextManager[None] = config.patch(settings)
    return patch


def is_functional(value: Any) -> bool:
    """Whether a value is one of AOTAutograd's tensors, whose updates in place become new values."""
    functional = private_once("torch._subclasses.functional_tensor.FunctionalTensor")
    return isinstance(value, functional)


def as_functional(value: Any) -> Any:
    """While AOTAutograd traces, make a functional tensor of a traced value."""
    return private_once(f"{_FUNCTIONAL}.to_functional")(value)


def replace_functional(tensor: Any, value: Any) -> None:
    """While AOTAutograd traces, make `value` the result of an update in place of `tensor`."""
    tensor.replace_(value.from_functional())
    tensor.commit_update()
    tensor.sync()


@contextlib.contextmanager
def leaves_cast_once() -> Iterator[None]:
    """Trace a joint graph in which autocast casts each leaf once, and casts nothing in the
    backward."""
    mirrored, thread = private("torch._mirror_autograd_meta_to"), threading.get_ident()

    def as_leaf(source: Any, made: Any) -> Any:
        if threading.get_ident() == thread and source.is_leaf:
            return made.requires_grad_(source.requires_grad)
        return mirrored(source, made)

    with (
        functorch_set(backward_pass_autocast="off"),
        patched(
            "torch.fx.experimental.proxy_tensor.disable_autocast_cache", contextlib.nullcontext
        ),
        patched("torch._mirror_autograd_meta_to", as_leaf),
    ):
        yield


@contextlib.contextmanager
def values_described_once() -> Iterator[None]:
    """Trace without `tensor_meta`, since a node's `val` holds the same. Traces of other threads,
    which Inductor may compile, have both."""
    describe, thread = optional(_METADATA), threading.get_ident()
    if describe is None:
        yield
        return

    def described(value: Any) -> Any:
        return None if threading.get_ident() == thread else describe(value)

    with patched(_METADATA, described):
        yield


def code_written_late() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the Python code of graphs is written only when they run."""
    lazy: contextlib.AbstractContextManager[Any] = private(
        "torch.fx._lazy_graph_module._use_lazy_graph_module"
    )(True)
    return lazy
