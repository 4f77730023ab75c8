"""Runs a custom autograd function as two operators of a graph: its forward and its backward.

Their kernels are the user's own code, unchanged, so that results are eager's whatever the code does
(kernels launched by hand, host code, `out=`). What a call keeps for its backward (saved tensors,
and tensors among the context's attributes) are results of the first operator and operands of the
second. Each runs once in a step, in the forward's order: memopt cannot see what its code draws or
changes, and so never runs it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from memopt.errors import CaptureError
from memopt.torch_private import pytree
from memopt.torch_private.access import patched
from memopt.torch_private.aot import FakeTensorMode
from memopt.torch_private.modes import autograd_in_kernels, dispatch_modes_off
from memopt.torch_private.tensors import storage_key
from memopt.user_code.reached_state import ReachedState

Function: TypeAlias = type[torch.autograd.Function]
T = TypeVar("T")

_OWN = {"needs_input_grad", "saved", *vars(FunctionCtx())}
_OWN |= {"to_save", "dirty_tensors", "non_differentiable", "materialize_grads", "saved_for_forward"}


class StridedLayout(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> StridedLayout:
        """Return a tensor's layout.

        Raises:
            CaptureError: its size is not a number.
        """
        sizes = (*tensor.shape, *tensor.stride())
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise CaptureError(
                "an autograd function whose code cannot be traced gets a dynamic shape"
            )
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Make a tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Place(NamedTuple):
    """Where a value is: an operand ("given") or a result ("made") of the forward's operator, or a
    constant."""

    where: str
    number: int = 0
    value: Any = None


class Context(FunctionCtx):
    """What a custom function's forward and backward get as their context."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved: tuple[Tensor | None, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """What the forward saved for the backward."""
        return self.saved


@dataclass(frozen=True)
class Returned:
    """What a run of a forward returned and kept, without the tensors' values.

    Attributes:
        made: layouts of the operator's results.
        outputs: the function's outputs.
        single: whether it returned one tensor, and no tuple.
        saved: what was saved for the backward.
        attributes: the context's attributes: names and places of their leaves, and how these nest.
        materialize: whether output gradients that are missing are zeros.
        constant: the outputs marked as not differentiable.
    """

    made: tuple[StridedLayout, ...]
    outputs: tuple[Place, ...]
    single: bool
    saved: tuple[Place, ...]
    attributes: tuple[tuple[str, tuple[Place, ...], Any], ...]
    materialize: bool
    constant: tuple[int, ...]


class _Results:
    """Collects an operator's results; what shares memory with something else is copied."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._given = {id(tensor): index for index, tensor in enumerate(given)}
        self._storages = {id_of_storage(tensor) for tensor in given}
        self._made: dict[int, int] = {}
        self._kept = list(given)
        self.tensors: list[Tensor] = []

    def own(self, tensor: Tensor) -> Place:
        """Add a result; one that was added before is copied."""
        storage = id_of_storage(tensor)
        result = tensor.clone() if storage in self._storages else tensor
        self._storages |= {storage, id_of_storage(result)}
        self._made.setdefault(id(tensor), len(self.tensors))
        self._kept.append(tensor)
        self.tensors.append(result.detach())
        return Place("made", len(self.tensors) - 1)

    def place(self, value: Any) -> Place:
        """Return where a value is that the backward reads; a tensor that is nowhere is added."""
        if not isinstance(value, Tensor):
            return Place("constant", 0, value)
        if id(value) in self._given:
            return Place("given", self._given[id(value)])
        if id(value) in self._made:
            return Place("made", self._made[id(value)])
        return self.own(value)


def is_run_again(function: Function) -> bool:
    """Return whether a custom function is made of a plain one, which its backward runs again."""
    return getattr(function, "is_run_again", False)


def id_of_storage(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share memory; else another."""
    return int(storage_key(tensor.untyped_storage()))


def returned(
    context: Context, output: Any, given: Sequence[Tensor]
) -> tuple[list[Tensor], Returned]:
    """Return the results of a forward's operator, and what they are."""
    results = _Results(given)
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    marked = {id(one) for one in getattr(context, "non_differentiable", ())}
    constant = tuple(i for i, one in enumerate(outputs) if id(one) in marked)
    places = tuple(
        results.own(one) if isinstance(one, Tensor) else Place("constant", 0, one)
        for one in outputs
    )
    saved = tuple(results.place(one) for one in getattr(context, "to_save", ()))
    attributes = []
    for name in sorted(vars(context).keys() - _OWN):
        leaves, nest = pytree.tree_flatten(getattr(context, name))
        attributes.append((name, tuple(results.place(leaf) for leaf in leaves), nest))
    return results.tensors, Returned(
        made=tuple(StridedLayout.of(one) for one in results.tensors),
        outputs=places,
        single=not isinstance(output, (tuple, list)),
        saved=saved,
        attributes=tuple(attributes),
        materialize=getattr(context, "materialize_grads", True),
        constant=constant,
    )


def why_not_same(planned: Returned, now: Returned) -> str | None:
    """Return a difference of a run from the planned one; None if there is none."""
    if planned.made != now.made:
        return f"its results and what it saves have the layouts {now.made}, planned {planned.made}"
    before = {name: (places, nest) for name, places, nest in planned.attributes}
    after = {name: (places, nest) for name, places, nest in now.attributes}
    for name in before.keys() | after.keys():
        if before.get(name) is None or not _same(before[name], after.get(name)):
            return f"its context's attribute {name!r} is another one in each call"
    return (
        None
        if _same(replace(planned, attributes=()), replace(now, attributes=()))
        else "it returns or saves other values"
    )


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False


class Autocast(NamedTuple):
    """Autocast's settings for a type of device."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> tuple[Autocast, ...]:
        """Return the settings of the devices that tensors are on."""
        kinds = sorted({tensor.device.type for tensor in tensors} - {"meta"})
        return tuple(
            cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )


@contextlib.contextmanager
def as_when_traced(autocast: Sequence[Autocast]) -> Iterator[None]:
    """Run code without autograd, with autocast as it was when its call was traced. What it lets
    autograd record inside is recorded under a dispatch mode, too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(autograd_in_kernels())
        stack.enter_context(torch.no_grad())
        for one in autocast:
            stack.enter_context(torch.autocast(one.device, one.dtype, one.enabled))
        yield


def with_layouts(
    function: Function, layouts: Sequence[StridedLayout], run: Callable[[list[Tensor]], T]
) -> T:
    """Run a function's code on tensors of these layouts, to learn what it returns: on tensors
    without values; where it needs values, on zeros. What it changes and draws is restored.

    Raises:
        CaptureError: it fails on both.
    """
    state = ReachedState([function, function.forward, function.backward])
    devices = sorted({one.device for one in layouts if one.device.type == "cuda"}, key=str)
    try:
        with (
            dispatch_modes_off(),
            torch.random.fork_rng(devices),
            patched("torch.compiler._is_compiling_flag", False),
        ):
            try:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    return run([one.empty() for one in layouts])
            except CaptureError:
                raise
            except Exception:  # noqa: BLE001 - whatever its code makes of tensors without values
                return run([one.empty().zero_() for one in layouts])
    except CaptureError:
        raise
    except Exception as error:  # the user's code
        raise CaptureError(
            f"{function.__qualname__} cannot be traced, nor run on zeros to learn what it returns: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        state.restore()
