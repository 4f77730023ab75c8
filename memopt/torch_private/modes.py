"""The context of a call: modes, hooks on saved tensors, profilers and autograd's state."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from memopt.models.deferred_interrupt import at_its_end
from memopt.torch_private.access import (
    attribute,
    attribute_name,
    known,
    optional,
    patched,
    private,
    private_once,
    required,
)

with required("torch.utils._python_dispatch.TorchDispatchMode"):
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
with required("torch.utils._python_dispatch.is_traceable_wrapper_subclass"):
    from torch.utils._python_dispatch import (
        is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    )
with required("torch.utils._device.DeviceContext"):
    from torch.utils._device import DeviceContext as DeviceContext

_FORWARD_CLASS = "torch.autograd.function.BackwardCFunction._forward_cls"
_DOUBLE_BACKWARD = (
    "torch._functorch._aot_autograd.runtime_wrappers.CompiledFunction._double_backward"
)
_use_count = attribute("torch.Tensor._use_count")
_number = attribute("torch.autograd.graph.Node._sequence_nr")
_SET_NUMBER = "torch.autograd.graph.Node._set_sequence_nr"
_LAST_NUMBER = 2**64 - 1
"""The sequence number of all nodes that accumulate gradients: autograd takes the largest first."""


def dispatch_modes() -> list[Any]:
    """Return the active dispatch modes, the outermost first."""
    if not private_once("torch._C._len_torch_dispatch_stack")():
        return []
    return list(private_once("torch.utils._python_dispatch._get_current_dispatch_mode_stack")())


def dispatch_modes_off() -> contextlib.AbstractContextManager[Any]:
    """Return a context without the active dispatch modes."""
    off: contextlib.AbstractContextManager[Any] = private(
        "torch.utils._python_dispatch._disable_current_modes"
    )()
    return off


def function_modes() -> list[Any]:
    """Return the active function modes, the outermost first."""
    if not private_once("torch._C._len_torch_function_stack")():
        return []
    return list(private_once("torch.overrides._get_current_function_mode_stack")())


_dispatch_modes_length = private("torch._C._len_torch_dispatch_stack")
_function_modes_length = private("torch._C._len_torch_function_stack")
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = private(
    "torch._C._AutoDispatchBelowAutograd"
)
"""Make a context in which operators skip autograd: nothing is recorded, no version counted."""


def nobody_looks_on() -> bool:
    """Whether no mode sees the operators or functions that are called now."""
    return not (_dispatch_modes_length() or _function_modes_length())


@contextlib.contextmanager
def function_modes_off() -> Iterator[None]:
    """Disable the caller's function modes inside: Dynamo's graph has their effects already."""
    pop, push = private("torch.overrides._pop_mode"), private("torch.overrides._push_mode")
    count = private("torch._C._len_torch_function_stack")
    taken: list[object] = []
    try:
        while count():
            taken.append(pop())
        yield
    finally:
        while taken:
            push(taken.pop())


def saved_tensor_hooks() -> Any:
    """Return the innermost hooks on saved tensors, (pack, unpack); None: there are none."""
    return private_once("torch._C._autograd._top_saved_tensors_default_hooks")(True)


@contextlib.contextmanager
def saved_tensor_hooks_off() -> Iterator[None]:
    """Disable the caller's hooks on saved tensors inside."""
    pop = private("torch._C._autograd._pop_saved_tensors_default_hooks")
    push = private("torch._C._autograd._push_saved_tensors_default_hooks")
    taken = []
    try:
        while (hooks := saved_tensor_hooks()) is not None:
            pop()
            taken.append(hooks)
        yield
    finally:
        while taken:
            push(*taken.pop())


def profiler_looks_on() -> bool:
    """Whether torch's profiler records what this thread does."""
    return bool(private_once("torch.autograd._profiler_enabled")())


def profile_begun() -> bool:
    """Whether torch's profiler records what this thread does, or somebody's profile with a schedule
    warms up or records. (Another profile would end it, and torch would crash when its schedule goes
    on.)"""
    if profiler_looks_on():
        return True
    # Their steps are counted from the time they are made: without any, none is looked for.
    if "ProfilerStep" not in private_once("torch.autograd.profiler.KinetoStepTracker._step_dict"):
        return False
    profile, idle = torch.profiler.profile, torch.profiler.ProfilerAction.NONE
    return any(
        getattr(one, "step_rec_fn", None) is not None and one.current_action != idle
        for one in gc.get_objects()
        if issubclass(type(one), profile)
    )


@contextlib.contextmanager
def before_other_profiles(call: Callable[[], None]) -> Iterator[None]:
    """Call a function before somebody else starts torch's profiler: only one can run at a time."""
    prepare = private("torch.autograd.profiler._prepare_profiler")

    def after_it(*args: Any, **kwargs: Any) -> Any:
        call()
        return prepare(*args, **kwargs)

    with patched("torch.autograd.profiler._prepare_profiler", after_it):
        yield


@contextlib.contextmanager
def operators_alone() -> Iterator[None]:
    """Let a profile that begins inside record operators only, no ranges (`record_function`, a
    process group's work). A range that outlives its profile writes to freed memory if another
    profile runs then, or in a process group's thread."""
    enable = private("torch.autograd.profiler._enable_profiler")
    scope = private("torch._C._profiler.RecordScope").FUNCTION
    only = functools.partial(enable, scopes={scope})
    with patched("torch.autograd.profiler._enable_profiler", only):
        yield


def allocation_tag() -> Any:
    """Return the tag of allocation events in a profile."""
    return private("torch._C._profiler._EventType").Allocation


def inside_transform() -> bool:
    """Whether this thread runs inside of a transform of torch.func (vmap, grad, jvp), or forward
    derivatives are taken (`torch.autograd.forward_ad.dual_level`)."""
    if private_once("torch._C._functorch.maybe_current_level")() is not None:
        return True
    return int(private("torch.autograd.forward_ad._current_level")) >= 0


def is_batch(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is a batch of gradients (`is_grads_batched=True`), which looks like a
    single one."""
    found = private_once("torch._C._functorch.is_legacy_batchedtensor")
    return gradient is not None and bool(found(gradient))


def traced_by_jit() -> bool:
    """Whether torch.jit.trace traces what this thread runs."""
    return bool(private_once("torch._C._is_tracing")())


def backward_number() -> int:
    """Return the number of the backward that this thread runs; -1: it runs none."""
    return int(private_once("torch._C._current_graph_task_id")())


def when_backward_is_over(call: Callable[[], None]) -> None:
    """Call a function once the running backward has returned or failed, and autograd has restored
    the thread's state."""
    # Autograd holds its final callbacks as long as the backward.
    over = functools.partial(_is_over, at_its_end(call))
    private("torch.autograd.Variable._execution_engine").queue_callback(over)


def _is_over(_ending: object) -> None:
    pass


def keeps_graph() -> bool:
    """Whether the running backward was called with retain_graph=True."""
    return bool(private_once("torch._C._autograd._get_current_graph_task_keep_graph")())


def running_node() -> Any:
    """Return the autograd node that this thread runs; None: it runs none."""
    return private("torch._C._current_autograd_node")()


def wanted_inputs() -> frozenset[int]:
    """Return the positions of the running node's inputs whose gradients the backward asks for."""
    inputs = enumerate(running_node().next_functions)
    return frozenset(i for i, (node, _) in inputs if node is not None and _is_wanted(node))


def _is_wanted(node: Any) -> bool:
    try:
        return bool(private_once("torch._C._will_engine_execute_node")(node))
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked for
        return True


def node_number(node: Any) -> int:
    """Return the sequence number of an autograd node: nodes made later have larger ones."""
    return int(_number(node)())


def only_the_backward_holds(gradient: torch.Tensor) -> bool:
    """Whether autograd, which adds to a gradient in a dispatch mode's call, is all that holds it:
    it adds in place then, unless tensors are traced."""
    return bool(_use_count(gradient)() == _count_of_the_backward())


@functools.cache
def _count_of_the_backward() -> int:
    """Return the use count, in a dispatch mode's call, of a gradient that only autograd holds."""
    counts: list[int] = []

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.add.Tensor:
                counts.append(_use_count(args[0])())
            return func(*args, **(kwargs or {}))

    def count() -> None:
        leaf = torch.ones(1, requires_grad=True, device="cpu")
        total = leaf.sin() + leaf.cos()
        with Counting():  # type: ignore[no-untyped-call]
            torch.autograd.grad(total, leaf)

    # In a thread without the tracer's modes.
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return counts[0]


def accumulate_in_order(leaves: Sequence[torch.Tensor]) -> bool:
    """Have autograd run the nodes that accumulate the gradients of these leaves in this order. They
    run ahead of all other nodes, as always.

    Returns:
        Whether this torch lets their order be set.
    """
    if optional(_SET_NUMBER) is None:
        return False
    name = _SET_NUMBER.rpartition(".")[2]
    for place, leaf in enumerate(leaves):
        getattr(get_gradient_edge(leaf).node, name)(_LAST_NUMBER - place)
    return True


def function_of(node: Any) -> Any:
    """Return the `torch.autograd.Function` of an autograd node; None: it has none."""
    return getattr(type(node), attribute_name(_FORWARD_CLASS), None)


def differentiate_twice(function: Any, compute: Callable[..., Any]) -> bool:
    """Let `compute(context, backward, arguments)` compute second derivatives of AOTAutograd's
    function, which it refuses itself (torch 2.11 forgets to refuse).

    Returns:
        Whether the function is AOTAutograd's.
    """
    if not known(_DOUBLE_BACKWARD) or not hasattr(function, "_double_backward"):
        return False
    function._double_backward = staticmethod(compute)
    return True


def backward_owns_tangents() -> bool:
    """Whether a compiled backward can drop output gradients early (boxed gradient calls)."""
    return optional("torch.autograd.Function.boxed_grads_call") is not None


def autograd_in_kernels() -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators that a kernel calls are recorded by autograd, even if a
    dispatch mode has switched it off below itself."""
    excluded = private("torch._C._dispatch_tls_local_exclude_set")()
    for name, key in vars(torch._C.DispatchKey).items():
        if (name.startswith("Autograd") or name == "ADInplaceOrView") and excluded.has(key):
            excluded = excluded.remove(key)
    included = private("torch._C._dispatch_tls_local_include_set")()
    guard: contextlib.AbstractContextManager[None] = private("torch._C._ForceDispatchKeyGuard")(
        included, excluded
    )
    return guard


def give_back_workspaces() -> None:
    """Let cuBLAS return its workspaces, of all threads and streams, to torch's CUDA allocator."""
    private("torch._C._cuda_clearCublasWorkspaces")()
