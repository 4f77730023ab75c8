"""Describes the example call of a model, and matches later calls to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memopt.step.objects import as_tuples, is_object, objects_in, opened
from memopt.torch_private import pytree
from memopt.torch_private.tensors import storage_key

Orders: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""(position among an output's leaves, dimensions of its gradient from the largest stride on)."""


@dataclass(frozen=True)
class Call:
    """One call of a model: positional and keyword arguments, and their flat leaves.

    Attributes:
        args, kwargs: the arguments.
        whole_masks: the leaves that, as attention masks, mask nothing; it is captured without them
            (`memopt.capture.as_eager.masks`).
        orders: how gradients of its outputs arrive, if it is captured for other layouts than the
            outputs'.
        looked: what traces of the call are told of its values, in order; else these are looked at.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    whole_masks: tuple[int, ...] = ()
    orders: Orders = ()
    looked: tuple[Any, ...] = ()

    @cached_property
    def opened(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with objects as torch's containers, which unflatten to objects."""
        args, kwargs = opened((self.args, self.kwargs))
        return args, kwargs

    @cached_property
    def plain(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the captured graph takes them: objects as tuples."""
        if self.opened[1] is self.kwargs:
            return self.opened
        args, kwargs = as_tuples(self.opened)
        return args, kwargs

    @property
    def objects(self) -> tuple[Any, ...]:
        """Return the objects among the arguments, and inside them, that are opened."""
        return tuple(objects_in((self.args, self.kwargs)))

    @cached_property
    def leaves(self) -> list[Any]:
        """Return the flat values, in the order in which the captured graph takes them."""
        return pytree.tree_leaves(self.opened, is_leaf=lambda x: x is None)

    @cached_property
    def spec(self) -> pytree.TreeSpec:
        """Return the structure of the arguments."""
        return pytree.tree_structure(self.opened, is_leaf=lambda x: x is None)

    def tensors(self) -> list[Tensor]:
        """Return the tensor leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def detached(self) -> Call:
        """Return the same call for one forward: with new lists and dicts, as the forward may
        change them, and with tensors detached from the user's autograd graph, which a backward
        would run."""
        made: dict[int, Tensor] = {}

        def one(leaf: Tensor) -> Tensor:
            if leaf.is_leaf:
                return leaf
            if id(leaf) not in made:
                reached = torch.empty(0, requires_grad=True, device="cpu")
                made[id(leaf)] = _WithoutHistory.apply(leaf.detach(), reached)  # type: ignore[no-untyped-call]
            return made[id(leaf)]

        return self.with_tensors(one)

    def with_tensors(self, made_of: Callable[[Tensor], Tensor]) -> Call:
        """Return the same call with each tensor replaced by `made_of(tensor)`."""
        args, kwargs = pytree.tree_map_only(Tensor, made_of, self.opened)
        return replace(self, args=args, kwargs=kwargs)

    def with_tensors_at(
        self, positions: Iterable[int], made_of: Callable[[int, Tensor], Tensor]
    ) -> Call:
        """Return the same call with the tensors at these positions among its leaves, wherever they
        are, replaced by `made_of(position, tensor)`."""
        made: dict[int, Tensor] = {}
        for position in positions:
            tensor = self.leaves[position]
            if id(tensor) not in made:
                made[id(tensor)] = made_of(position, tensor)
        return self.with_tensors(lambda tensor: made.get(id(tensor), tensor))

    def let_go(self, kept: Iterable[Tensor]) -> None:
        """Free all tensors but `kept`: fakes of their layouts stand in for them (`filled`).
        Subclasses of Tensor stay."""
        from memopt.torch_private.aot import FakeTensorMode

        stay, mode = set(map(id, kept)), FakeTensorMode(allow_non_fake_inputs=True)
        made: dict[int, Tensor] = {}

        def one(old: Tensor) -> Tensor:
            if id(old) in stay or type(old) is not Tensor:
                return old
            if id(old) not in made:
                fake = mode.from_tensor(old.detach())
                made[id(old)] = fake.requires_grad_(old.requires_grad)
            return made[id(old)]

        freed = self.with_tensors(one)
        vars(self).update(args=freed.args, kwargs=freed.kwargs)
        for name in ("opened", "plain", "leaves", "spec"):
            vars(self).pop(name, None)

    def filled(self, given: Call | None = None) -> Call:
        """Return the call with zeros for tensors without values: those that it has freed, other
        fakes, and meta tensors (zeros on the CPU). Where a given call has a tensor of the same
        layout there, its memory is used instead."""
        from memopt.torch_private.aot import FakeTensor

        made: dict[int, Tensor] = {}
        tensors = () if given is None else given.tensors()
        there = {id(old): one for old, one in zip(self.tensors(), tensors, strict=False)}
        rooms = dict[int, torch.UntypedStorage]()

        def is_empty(old: Tensor) -> bool:
            return old.device.type == "meta" or isinstance(old, FakeTensor)

        def one(old: Tensor) -> Tensor:
            if not is_empty(old):
                return old
            if id(old) not in made:
                held, device = old.untyped_storage(), old.device
                device = torch.device("cpu") if device.type == "meta" else device
                like, layout = there.get(id(old)), (old.dtype, device, old.shape, old.stride())
                if type(like) is Tensor and _layout(like) == layout:
                    room, begin = like.untyped_storage(), like.storage_offset()
                else:
                    zeros = torch.zeros(held.nbytes(), dtype=torch.uint8, device=device)
                    room = rooms.setdefault(storage_key(held), zeros.untyped_storage())
                    begin = old.storage_offset()
                new = torch.empty(0, dtype=old.dtype, device=device)
                new.set_(room, begin, old.shape, old.stride())
                made[id(old)] = new.requires_grad_(old.requires_grad)
            return made[id(old)]

        return self.with_tensors(one) if any(map(is_empty, self.tensors())) else self

    def release(self, planned: Call) -> None:
        """Take their memory from the tensors that `planned.filled` has made."""
        for new, old in zip(self.tensors(), planned.tensors(), strict=True):
            if new is not old:
                new.data = torch.empty(0, dtype=new.dtype, device=new.device)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class _WithoutHistory(torch.autograd.Function):
    """Returns the value itself; its gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _reached: Tensor) -> Tensor:
        return value.detach()  # itself would be a view, which a forward may not change in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None


class _Waited(torch.autograd.Function):
    """Returns the result of a collective once it is there, in its own memory."""

    @staticmethod
    def forward(ctx: Any, result: Any) -> Tensor:
        there: Tensor = result.trigger_wait().data
        return there

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _waited(call: Call) -> Call:
    """Return the call with plain tensors for results of collectives (AsyncCollectiveTensor)."""
    if all(type(one) is Tensor or not hasattr(one, _WAIT) for one in call.leaves):
        return call
    made: dict[int, Any] = {}

    def one(leaf: Tensor) -> Tensor:
        if id(leaf) not in made:
            made[id(leaf)] = _Waited.apply(leaf) if hasattr(leaf, _WAIT) else leaf  # type: ignore[no-untyped-call]
        plain: Tensor = made[id(leaf)]
        return plain

    return call.with_tensors(one)


_WAIT = "trigger_wait"


def asks_for_gradients(model: nn.Module, call: Call) -> bool:
    """Return whether a parameter of the model, or a tensor of the call, requires a gradient."""
    return any(p.requires_grad for p in model.parameters()) or any(
        tensor.requires_grad for tensor in call.tensors()
    )


def repeated(leaves: Iterable[Any]) -> dict[int, int]:
    """Map positions of flat arguments → earlier positions of the same tensor."""
    first: dict[int, int] = {}
    found: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            earlier = first.setdefault(id(leaf), position)
            if earlier < position:
                found[position] = earlier
    return found


def device_of(model: nn.Module, call: Call) -> torch.device:
    """Return the one device of the model's parameters, buffers and inputs.

    Raises:
        ValueError: they are on several devices.
    """
    tensors = [*model.parameters(), *model.buffers(), *call.tensors()]
    devices = {t.device for t in tensors}
    accelerators = {d for d in devices if d.type != "cpu"}
    if len(accelerators) > 1 or (accelerators and any(p.device.type == "cpu" for p in tensors)):
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model and inputs must be on one device, found {names}; move them first")
    return next(iter(accelerators or devices), torch.device("cpu"))


def in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Make a call with its keywords sorted: one plan serves it in whatever order they are given."""
    return _waited(Call(args, dict(sorted(kwargs.items()))))


def to_call(inputs: Any) -> Call:
    """Turn a user's `inputs` into a Call: a tensor or an object (a dataclass...), a tuple/list of
    positional or a mapping of keyword arguments."""
    if isinstance(inputs, Call):
        return inputs
    if isinstance(inputs, Mapping):
        wrong = [key for key in inputs if not isinstance(key, str)]
        if wrong:
            raise ValueError(f"inputs: keyword arguments need names, got the key {wrong[0]!r}")
        return Call((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Call(tuple(inputs), {})
    if isinstance(inputs, DataLoader):
        raise ValueError(
            "inputs is one example batch, what the model is called with, and not a DataLoader: "
            "take it of next(iter(loader)), without what only the loss takes"
        )
    if isinstance(inputs, Tensor) or is_object(inputs):
        return Call((inputs,), {})
    raise ValueError(
        "inputs must be a tensor, a tuple of positional arguments or a dict of keyword "
        f"arguments of the model, got {type(inputs).__name__}"
    )


def align(model: nn.Module, planned: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call `model(*args, **kwargs)` in the planned call's form, if the two differ only
    in passing an argument by position or by name, or in spelling out a default; else the call as it
    is."""
    call = _waited(Call(args, kwargs))
    args, kwargs = call.args, call.kwargs
    if len(args) == len(planned.args) and kwargs.keys() == planned.kwargs.keys():
        return Call(args, {name: kwargs[name] for name in planned.kwargs})
    signature = inspect.signature(model.forward)
    given = _by_name(signature, call)
    wanted = _by_name(signature, planned)
    if given is None or wanted is None:
        return call
    defaults = {name: p.default for name, p in signature.parameters.items()}
    for name in given.keys() - wanted.keys():
        if not _same_value(given[name], defaults.get(name, inspect.Parameter.empty)):
            return call
    absent = inspect.Parameter.empty
    values = {name: given.get(name, defaults.get(name, absent)) for name in wanted}
    if any(value is absent for value in values.values()):
        return call
    return Call(
        tuple(values[name] for name in list(wanted)[: len(planned.args)]),
        {name: values[name] for name in planned.kwargs},
    )


def _by_name(signature: inspect.Signature, call: Call) -> dict[str, Any] | None:
    """Return every argument by its name, positional ones first; None if some have no name, or the
    call does not fit the signature."""
    try:
        named = dict(signature.bind(*call.args, **call.kwargs).arguments)
    except TypeError:
        return None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and named.get(name):
            return None
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def _same_value(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return not isinstance(value, Tensor) and type(value) is type(default) and value == default


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a model's parameters and buffers by their real paths (torch's CheckpointWrapper shows
    others); a tensor with several paths is listed under each."""
    return [
        *nn.Module.named_parameters(model, remove_duplicate=False),
        *nn.Module.named_buffers(model, remove_duplicate=False),
    ]
