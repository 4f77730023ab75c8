"""Running a user's model and loss so that they are afterwards what they were before.

Kept are the attributes of their modules, what lists and dicts there and in the closures of their
functions (hooks, the loss) hold, the values of their tensors, gradients, and the states of the
random generators. Other objects' attributes are left alone, but for the tensors among them: they
may belong to running threads, such as a data loader's.

Values are copied before they are first written to, so that a model that updates few tensors costs
few copies: a watched run (`StorageCopies.first_run`) finds them. Buffers are copied beforehand,
for kernels may write to running statistics without saying so.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.profiler.backend import random_state_kept
from memopt.profiler.inputs import Call

_MOST_OBJECTS = 100_000
"""Where the walk over Python objects ends; the model itself comes first."""
_WRITTEN_UNSAID = ("running_mean", "running_var")


class StorageCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies of the storages of a user's tensors, each made before it is first written to."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = (_storage(tensor) for tensor in tensors)
        self._storages = {int(s._cdata): s for s in found if s is not None}
        self._copies: dict[int, Any] = {}

    def first_run(self) -> StorageCopies:
        """Context of a run; what it writes to, later runs may write to without being watched."""
        return self

    def keep(self, tensor: Any) -> None:
        """Copy a tensor's storage now, unless that has been done or it is none of the user's."""
        storage = _storage(tensor)
        key = 0 if storage is None else int(storage._cdata)
        if key in self._storages and key not in self._copies:
            self._copies[key] = _copied(storage)

    def keep_all(self) -> None:
        """Copy all of them now: compiled code, which runs next, cannot be watched."""
        for key, storage in self._storages.items():
            if key not in self._copies:
                self._copies[key] = _copied(storage)

    def put_back(self) -> None:
        """Give the storages the sizes and the values that they had."""
        for key, copy in self._copies.items():
            storage = self._storages[key]
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        for position, argument in _written(func):
            value = args[position] if position < len(args) else given.get(argument)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                self.keep(tensor)
        return func(*args, **given)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes to."""
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    return tuple(
        (position, one.name)
        for position, one in enumerate(func._schema.arguments)
        if one.name in _WRITTEN_UNSAID or (one.alias_info is not None and one.alias_info.is_write)
    )


def _storage(tensor: Any) -> Any:
    """A tensor's storage; None where it has none that holds values."""
    plain = isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are; `resize_` changes all but the storage."""
    return tensor.data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()


def _copied(storage: Any) -> Any:
    """A storage's copy on the host."""
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()


class _Reached:
    """Everything that can be reached from a user's objects, and its state before."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._held: dict[int, Any] = {}
        waiting = deque(roots)
        self._roots = set(map(id, waiting))
        while waiting and len(self._held) < _MOST_OBJECTS:
            one = waiting.popleft()
            if id(one) not in self._held:
                self._held[id(one)] = one
                waiting.extend(self._look_at(one))
        self._flags = [(t, t.requires_grad, t.grad) for t in self.tensors if t.is_leaf]
        self._places = [(t, t.data) for t in self.tensors if _storage(t) is not None]

    def _look_at(self, one: Any) -> Iterable[Any]:
        """Note how an object is; what it holds."""
        match one:
            case torch.Tensor():
                self.tensors.append(one)
            case torch.Generator():
                self._generators.append((one, one.get_state()))
            case dict():
                self._dicts.append((one, dict(one)))
                return list(one.values())
            case list() | deque() | set():
                self._sequences.append((one, list(one)))
                return list(one)
            case tuple():
                return one
            case functools.partial():
                return (one.func, one.args, one.keywords)
            case types.MethodType():
                self._roots.add(id(one.__self__))
                return (one.__self__, one.__func__)
            case types.FunctionType():
                return [*_contents(one.__closure__ or ()), *(one.__defaults__ or ())]
            case nn.Module():
                return (one.__dict__,)
            case type() | types.ModuleType():
                return ()
            case _ if isinstance(getattr(one, "__dict__", None), dict):
                # The attributes of a loss that is an object; of others the tensors.
                state = one.__dict__
                values = [
                    v for v in state.values() if isinstance(v, (torch.Tensor, torch.Generator))
                ]
                return (state,) if id(one) in self._roots else values
        return ()

    def without_gradients(self) -> None:
        """No tensor has a gradient, so that none of the user's is added to."""
        for tensor, *_ in self._flags:
            tensor.grad = None

    def put_back(self) -> None:
        """Make the objects what they were; those that still are, are left alone."""
        for now, before in self._dicts:
            same = [*map(id, now)] == [*map(id, before)]
            if not same or any(now[key] is not before[key] for key in before):
                now.clear()
                now.update(before)
        for items, old in self._sequences:
            if len(items) != len(old) or any(a is not b for a, b in zip(items, old, strict=True)):
                items.clear()
                (items.update if isinstance(items, set) else items.extend)(old)
        for generator, state in self._generators:
            generator.set_state(state)
        for tensor, data in self._places:
            if _place(tensor) != _place(data):
                tensor.data = data
        for tensor, requires_grad, gradient in self._flags:
            if tensor.is_leaf and tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # empty until its function has run
            continue


@contextmanager
def state_restored(model: nn.Module, call: Call, *others: Any) -> Iterator[StorageCopies]:
    """Put everything back afterwards, whatever happens inside.

    Args:
        model, call: the user's model, and what it is called with.
        others: a loss, its targets, an optimizer: whatever else runs or is read.

    Yields:
        What copies values: the first run inside is to be `first_run()`, or, where compiled code
        runs, after `keep_all()`.
    """
    reached = _Reached((model, call.args, call.kwargs, *others))
    kept = StorageCopies(reached.tensors)
    owners = [one for one in (model, *others) if isinstance(one, nn.Module)]
    for buffer in (b for owner in owners for b in owner.buffers()):
        kept.keep(buffer)
    devices = dict.fromkeys(t.device for t in reached.tensors)
    restore = _other_generators()
    dtype = torch.get_default_dtype()
    try:
        reached.without_gradients()
        with random_state_kept(devices), torch.enable_grad():
            yield kept
    finally:

        def put_back() -> None:
            torch.set_default_dtype(dtype)
            restore()
            reached.put_back()
            kept.put_back()

        try:
            put_back()
        except BaseException:
            # Ctrl-C in the midst of it: again, whole.
            put_back()
            raise


@contextmanager
def forward_restored(
    model: nn.Module, call: Call, way: Callable[..., Any] | None = None
) -> Iterator[Any]:
    """Run a forward without gradients; everything is put back at the end of the block.

    Args:
        model, call: the user's model, and what it is called with.
        way: what runs for the model; None: itself.

    Yields:
        What it returns.
    """
    with state_restored(model, call) as kept, kept.first_run(), torch.no_grad():
        yield (way or model)(*call.args, **call.kwargs)


def _other_generators() -> Callable[[], None]:
    """Puts back the random states of Python, and of numpy where it is in use."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)

    return restore
