"""Describes kernel calls by signatures, one for each measurement, and makes stand-in arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch.fx import Node

from memopt.step.functions import EAGER_BACKWARD, costliest_values
from memopt.step.operators import runs_users_code
from memopt.torch_private import pytree
from memopt.torch_private.operators import OpOverload, schema_of
from memopt.torch_private.operators import aten as _ATEN
from memopt.torch_private.tensors import conjugated, negated

ENDS_PROCESS = frozenset({torch.ops.aten.mkldnn_rnn_layer_backward.default})
"""Kernels that end the process on arguments that do not fit each other."""

REFUSALS = (ArithmeticError, RuntimeError, IndexError, TypeError, ValueError)
"""Errors of kernels whose arguments do not fit, and of numbers (a division by a stand-in's 0)."""

_HOST = torch.device("cpu")
_MOST_ANSWERS = 20_000


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument, with everything that decides its kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int
    conjugated: bool = False
    """Whether it is read as the conjugate of its memory: many kernels copy it first."""
    negated: bool = False
    """Whether it is read as the negative of its memory."""
    device: torch.device = _HOST
    """Where it is: kernels of an accelerator read some arguments on the host."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        read = " conjugated" * self.conjugated + " negated" * self.negated
        # Of tensors on the host the text says nothing: costs measured on a CPU stay known.
        read += f" {self.device.type}" * (self.device.type not in ("cpu", "meta"))
        return f"{dtype}{list(self.shape)}s{list(self.stride)}+{self.offset}{read}"

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """Make a tensor of this layout over the elements of a storage."""
        found = flat.as_strided(self.shape, self.stride, self.offset)
        found = conjugated(found) if self.conjugated else found
        return negated(found) if self.negated else found


def _describe(value: Any) -> Any:
    if isinstance(value, Node):
        value = value.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return pytree.tree_map(_describe, value)
    if isinstance(value, torch.Tensor):
        return TensorArgument(
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
            value.dtype,
            value.untyped_storage().nbytes(),
            value.is_conj(),
            value.is_neg(),
            value.device,
        )
    return value


def describe_value(value: Any) -> Any:
    """Describe a call's arguments or a node's results: tensors and nodes become TensorArguments, in
    any nest of lists, tuples and dicts."""
    return pytree.tree_map(_describe, value)


@dataclass(frozen=True)
class Signature:
    """One kernel call with its arguments described; `text` identifies it.

    Attributes:
        places: the kinds of devices on which its results are (None: no tensor), as the fake kernel
            says; (): not known.
    """

    target: Any
    args: Any
    kwargs: Any
    text: str
    places: tuple[str | None, ...] = ()


def signature(node: Node) -> Signature:
    """Return the signature of a kernel-call node of a joint graph."""
    places = (v.device.type if isinstance(v, torch.Tensor) else None for v in values_of(node))
    return replace(call_signature(node.target, node.args, node.kwargs), places=tuple(places))


def call_signature(target: Any, args: Any, kwargs: Any) -> Signature:
    """Return the signature of a call, whose arguments are tensors or nodes."""
    args, kwargs = each(_describe, tuple(args)), each(_describe, dict(kwargs))
    texts = each(_text, args), each(_text, kwargs)
    return Signature(target, args, kwargs, f"{target}{texts}")


_LEAVES = (Node, torch.Tensor, TensorArgument, str, int, float, NoneType, torch.dtype)


def each(change: Callable[[Any], Any], arguments: Any) -> Any:
    """Change each leaf of a tuple or dict of arguments, in any nest. Most are not nested, and need
    no pytree, which takes ten times as long."""
    if type(arguments) is tuple and all(isinstance(one, _LEAVES) for one in arguments):
        return tuple(map(change, arguments))
    return pytree.tree_map(change, arguments) if arguments else arguments


def _text(described: Any) -> Any:
    if isinstance(described, torch.device):
        return described.type  # kernels are the same on each device of a kind
    # A description may itself be several: a node of several results.
    return str(described) if isinstance(described, _LEAVES) else pytree.tree_map(str, described)


def values_of(node: Node) -> tuple[Any, ...]:
    """Return the (fake) values of a node: one for a tensor, one per element for a list or tuple."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return (value,)


def output_mask(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[bool] | None:
    """Return a call's `output_mask`, which tells the results asked for; None: all are."""
    known = isinstance(target, OpOverload)
    names = [argument.name for argument in schema_of(target).arguments] if known else []
    if "output_mask" not in names:
        return None
    position = names.index("output_mask")
    mask: Sequence[bool] | None = (
        args[position] if position < len(args) else kwargs.get("output_mask")
    )
    return mask


class Answers(dict[Any, Any]):
    """A cache of answers about calls; it is emptied when it holds too many."""

    def find(self, key: Any, find: Callable[[], Any]) -> Any:
        """Return the answer for a key; compute it by `find` if it is not in the cache."""
        if key not in self:
            if len(self) >= _MOST_ANSWERS:
                self.clear()
            self[key] = find()
        return self[key]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def copied(arguments: Arguments) -> Arguments:
    """Copy the arguments with their tensors' layouts: `clone` leaves out gaps between elements, and
    some kernels copy a tensor that has any."""
    made: Arguments = pytree.tree_map_only(torch.Tensor, _whole_copy, arguments)
    return made


def _whole_copy(value: torch.Tensor) -> torch.Tensor:
    like: TensorArgument = describe_value(value)
    stored = negated(value) if like.negated else value
    stored = conjugated(stored) if like.conjugated else stored
    size = value.untyped_storage().nbytes() // value.element_size()
    return like.over(stored.as_strided((size,), (1,), 0).clone())


class StandIns:
    """Stand-in tensor arguments on a device, each in a storage of its own, as in a real step (some
    kernels clone an argument's whole storage); what a call reads on the host is on the host.

    Values are harmless for every kernel: floats uniform in [0, 1), integers 0, booleans True. A
    separate generator draws them, so that training's random numbers stay the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self._given: dict[str, Arguments] = {}

    def give(self, arguments: Mapping[str, Arguments]) -> None:
        """Use copies of these arguments for the calls with these texts."""
        self._given.update(arguments)

    def _pool(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        pool = self._pools.get(dtype)
        if pool is None or pool.numel() < elements:
            real = dtype if dtype.is_complex else torch.float32
            draw = self._generator
            pool = torch.rand(elements, device=self._device, dtype=real, generator=draw).to(dtype)
            self._pools[dtype] = pool
        return pool[:elements]

    def _tensor(self, wanted: TensorArgument) -> torch.Tensor:
        elements = -(-wanted.storage_bytes // wanted.dtype.itemsize)
        place = self._place(wanted)
        if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
            flat = torch.empty(elements, device=place, dtype=wanted.dtype)
            flat.copy_(self._pool(wanted.dtype, elements))
        else:
            value = wanted.dtype is torch.bool
            flat = torch.full((elements,), value, device=place, dtype=wanted.dtype)
        return wanted.over(flat)

    def _place(self, wanted: TensorArgument) -> torch.device:
        return _HOST if wanted.device.type == "cpu" else self._device

    def arguments(self, one: Signature) -> Arguments:
        """Make real arguments for a call."""
        if one.text in self._given:
            args, kwargs = copied(self._given[one.text])
        else:
            made = pytree.tree_map_only(TensorArgument, self._tensor, (one.args, one.kwargs))
            args, kwargs = made
        # Plans must hold for every step, and some kernels' costs depend on values.
        change = _COSTLIEST.get(one.target)
        if change is not None:
            change(args)
        return args, kwargs


_LARGE_NORM = 10.0
"""A norm above 3 (float32) or 6 (float64), for which `matrix_exp` squares matrices."""


def needs_real_values(target: Any) -> bool:
    """Return whether a call is measured on the arguments of a real step."""
    return target in ENDS_PROCESS or runs_users_code(target)


def declare_costliest(target: Any, change: Callable[[tuple[Any, ...]], None]) -> None:
    """Declare how `make_costliest` changes the arguments of an operator."""
    _COSTLIEST[target] = change


def _no_empty_bags(arguments: tuple[Any, ...]) -> None:
    """Give every bag the size 1, so that none is empty: with mode "max" the gradient copies the
    rows of all bags that are not."""
    bag_sizes = arguments[4]
    bag_sizes.fill_(1)


def _several_norms(arguments: tuple[Any, ...]) -> None:
    """Give the matrices different norms: a larger norm takes a polynomial of a higher degree, and a
    batch of different norms is divided into copies."""
    matrices = arguments[0]
    if not matrices.numel():
        return
    *batch, rows, _ = matrices.shape
    norms = torch.full((matrices[..., 0, 0].numel(),), _LARGE_NORM, device="cpu")
    for position, smaller in enumerate((1.0, 2.0)[: len(norms) - 1]):
        norms[position] = smaller
    matrices.copy_((norms / rows).reshape(*batch, 1, 1).expand(matrices.shape))


_COSTLIEST: dict[Any, Callable[[tuple[Any, ...]], None]] = {
    EAGER_BACKWARD: costliest_values,
    _ATEN._embedding_bag_backward.default: _no_empty_bags,
    _ATEN.linalg_matrix_exp.default: _several_norms,
}
