"""Runs a user's model and loss and restores their state afterwards.

Recorded are what their functions can reach and change (`memopt.user_code.reached_state`), the
values of the tensors among it, those tensors' gradients and hooks, and the states of the random
generators. The hooks do not run: they serve a user's gradients, and planning's are not the user's.

Values are copied before they are first written to, so that a model that updates few tensors costs
few copies: a watched run (`StorageCopies.first_run`) finds them. Buffers are copied beforehand,
since kernels may write to running statistics without declaring it.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memopt.step.backend import random_state_kept
from memopt.step.inputs import Call
from memopt.step.numerics import precisions, set_precision
from memopt.step.ranks import check_in_step
from memopt.step.shards import local_part
from memopt.step.unheard import unheard
from memopt.torch_private.aot import FakeTensor
from memopt.torch_private.modes import (
    TorchDispatchMode,
    dispatch_modes_off,
    is_traceable_wrapper_subclass,
)
from memopt.torch_private.modules import hooks_on_all_forwards
from memopt.torch_private.operators import OpOverload, schema_of
from memopt.torch_private.tensors import storage_key
from memopt.user_code.own_backward import OwnBackward, gradient_hooks_off
from memopt.user_code.reached_state import ReachedState

_INSIDE: dict[int, list[Callable[[], None]]] = {}
"""By id, for each `state_restored` that is entered, the changes inside that outlast it."""
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_WRITTEN_UNSAID = ("running_mean", "running_var")


class StorageCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies of the storages of a user's tensors, each made before the storage is first written to.

    Attributes:
        backward: runs a backward without the user's hooks.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        given = list(tensors)
        self.backward = OwnBackward(given)
        found = map(_storage, map(local_part, given))
        self._storages = {int(storage_key(s)): s for s in found if s is not None}
        self._copies: dict[int, Any] = {}

    def first_run(self) -> StorageCopies:
        """Watch a run. Later runs may write to the same storages without being watched."""
        return self

    def keep(self, tensor: Any) -> None:
        """Copy a tensor's storage now, unless it is copied already or not the user's."""
        storage = _storage(local_part(tensor))
        key = 0 if storage is None else int(storage_key(storage))
        if key in self._storages and key not in self._copies:
            self._copies[key] = _copied(storage)

    def keep_all(self) -> None:
        """Copy all storages now: compiled code, which runs next, cannot be watched."""
        for key, storage in self._storages.items():
            if key not in self._copies:
                self._copies[key] = _copied(storage)

    def restore(self) -> None:
        """Restore the sizes and the values of the copied storages."""
        for key, copy in self._copies.items():
            storage = self._storages[key]
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        check_in_step(func)
        given = kwargs or {}
        for position, argument in _written(func):
            value = args[position] if position < len(args) else given.get(argument)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                self.keep(tensor)
        return func(*args, **given)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes to."""
    if not isinstance(func, OpOverload):
        return ()
    return tuple(
        (position, one.name)
        for position, one in enumerate(schema_of(func).arguments)
        if one.name in _WRITTEN_UNSAID or (one.alias_info is not None and one.alias_info.is_write)
    )


def _storage(tensor: Any) -> Any:
    """Return a tensor's storage; None if it has none that holds values."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or is_lazy(tensor):
        return None
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):  # its parts have some
        return None
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where a tensor's values lie: address, offset, sizes and strides. `resize_` may change
    all four."""
    return tensor.data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()


def _copied(storage: Any) -> Any:
    """Return a storage's copy on the host."""
    with dispatch_modes_off():
        return storage.clone() if storage.device.type == "cpu" else storage.cpu()


class _UserTensors:
    """A user's tensors with their places in memory, `requires_grad` flags and gradients."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._flags = [(t, t.requires_grad, t.grad) for t in tensors if t.is_leaf]
        self._places = [(t, t.data) for t in tensors if _storage(t) is not None]

    def without_gradients(self) -> None:
        """Remove all gradients, so that none of the user's is added to."""
        for tensor, *_ in self._flags:
            tensor.grad = None

    def restore(self) -> None:
        """Restore the tensors, except for their values."""
        for tensor, data in self._places:
            if _place(tensor) != _place(data):
                tensor.data = data
        for tensor, requires_grad, gradient in self._flags:
            if tensor.is_leaf and tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


def libraries_ready() -> None:
    """Have einops register its functions for tensors now, which its first call does otherwise. If
    that were undone with a step's changes, a plan's first call would find something changed."""
    if "einops" in sys.modules:
        for tensor in (torch.empty(0, device="cpu"), nn.Parameter(torch.empty(0, device="cpu"))):
            sys.modules["einops"].rearrange(tensor, "a -> a")


def outlasting(change: Callable[[], None]) -> None:
    """Make a change that stays where the state around it is restored."""
    change()
    for changes in _INSIDE.values():
        changes.append(change)


@contextmanager
def state_restored(model: nn.Module, call: Call, *others: Any) -> Iterator[StorageCopies]:
    """Restore everything afterwards, whatever happens inside.

    Args:
        model, call: the user's model, and its arguments.
        others: a loss, its targets, an optimizer: anything else that is run or read.

    Yields:
        The StorageCopies. The first run inside goes in its `first_run()`, or, if it is compiled
        code, after its `keep_all()`. Its `backward` runs backwards inside.
    """
    libraries_ready()
    parts = (model, call.args, call.kwargs, *call.objects, *others, *hooks_on_all_forwards())
    reached = ReachedState(parts)
    tensors = _UserTensors(reached.tensors)
    kept = StorageCopies(reached.tensors)
    owners = [one for one in (model, *others) if isinstance(one, nn.Module)]
    for buffer in (b for owner in owners for b in owner.buffers()):
        kept.keep(buffer)
    devices = dict.fromkeys(t.device for t in reached.tensors)
    restore = _other_generators()
    settings = _settings()
    changes: list[Callable[[], None]] = []
    _INSIDE[id(changes)] = changes
    try:
        tensors.without_gradients()
        with gradient_hooks_off(reached.tensors), random_state_kept(devices), torch.enable_grad():
            yield kept
    finally:

        def restore_everything() -> None:
            settings()
            restore()
            reached.restore()
            tensors.restore()
            kept.restore()

        try:
            restore_everything()
        except BaseException:
            # Ctrl-C interrupted the restoring: restore everything again.
            restore_everything()
            raise
        finally:
            del _INSIDE[id(changes)]
            for change in changes:
                change()


@contextmanager
def forward_restored(
    model: nn.Module, call: Call, way: Callable[..., Any] | None = None
) -> Iterator[Any]:
    """Run a forward without gradients; everything is restored at the end of the block.

    Args:
        model, call: the user's model, and its arguments.
        way: called in the model's place; None: the model itself.

    Yields:
        The output.
    """
    with state_restored(model, call) as kept, kept.first_run(), torch.no_grad():
        with unheard():
            output = (way or model)(*call.args, **call.kwargs)
        yield output


def lets_tensors_train(model: nn.Module, call: Call, error: Exception) -> bool:
    """Let those tensors of a model require gradients that its first call does
    (`self.zero.requires_grad_()`), and whose trace fails for that.

    Returns:
        Whether there are any, so that another trace is worth trying.
    """
    if "Unsupported Tensor.requires_grad_() call" not in str(error):
        return False
    frozen = [one for one in (*model.parameters(), *model.buffers()) if not one.requires_grad]
    trained: list[torch.Tensor] = []
    with suppress(Exception), forward_restored(model, call):
        trained = [one for one in frozen if one.requires_grad]

    def change() -> None:
        for one in trained:
            one.requires_grad_()

    outlasting(change)
    return bool(trained)


def _settings() -> Callable[[], None]:
    """Return a function that restores torch's global settings, which a forward may change."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, each = _matmul_precision(), precisions()
    attention = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION}

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if precision is not None and _matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        for name, value in precisions().items():
            if value != each[name]:
                set_precision(name, each[name])
        for name, enabled in attention.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)

    return restore


def _matmul_precision() -> str | None:
    """Return torch's one precision of float32 products; None if they are set one by one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _other_generators() -> Callable[[], None]:
    """Return a function that restores the random states of Python, and of numpy if it is loaded."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)

    return restore
