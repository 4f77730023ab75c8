"""What a plan was made for: the model, its mode and its example call, as plain data.

A plan file stores it, and applying a plan compares it with the model at hand, so that a refusal
names what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument, parameter or buffer, without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{self.dtype}{list(self.shape)} with strides {self.strides} on {self.device}{grad}"


@dataclass(frozen=True, slots=True)
class Plain:
    """An argument that is None, a bool, an int, a float or a str."""

    value: bool | int | float | str | None

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Nest:
    """A tuple, list or dict of arguments; `keys` are a dict's, in its order."""

    kind: str
    items: tuple[Argument, ...]
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"a {self.kind} of {len(self.items)}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that a file cannot hold."""

    type_name: str

    def __str__(self) -> str:
        return f"a {self.type_name}"


Argument: TypeAlias = TensorSpec | Plain | Nest | Opaque


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """What the user's loss is known to do with the leaves of the model's output.

    Attributes:
        unused: positions of the leaves that get no gradient.
        strides: (position, strides) of gradients, where they arrive without gaps.
        held_bytes: that live to the end of the step beside the gradients: larger tensors of which
            gradients of parameters and inputs are parts; and, where torch holds what it hands over
            (2.11), gradients that are copied on their way into the backward.
    """

    unused: tuple[int, ...] = ()
    strides: tuple[tuple[int, tuple[int, ...]], ...] = ()
    held_bytes: int = 0


ANY_LOSS = OutputGradients()
"""Nothing is known of the loss: every output may get a gradient, laid out as the output is."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What a plan was made for.

    Attributes:
        model: qualified name of the model's class, for people.
        device: "cpu" or "cuda".
        args: the positional arguments of the example call, a tuple.
        kwargs: its keyword arguments, a dict.
        training: (name of a sub-module, its training flag), the model itself being "".
        tensors: (name, description) of every parameter and buffer.
        autocast: dtype of autocast on cpu and cuda; None: off.
        torch_version: the torch that captured it.
        block_bytes: the allocator's granularity in the captured graph.
        fingerprint: of the captured graph; "" if it was not captured.
        output_gradients: what the planned loss does with the model's output.
        loss_bytes: of the planned loss itself, which lives from its step into the next one and is
            charged as resident, if it takes more than a number.
        library_bytes: what libraries keep on the device from step to step, charged as resident.
        resized: (tensor, its size as captured) of the graph's tensors that profiling found to
            have another size.
        repeated: (position, earlier position) of each flat argument that is the same tensor as an
            earlier one.
    """

    model: str
    device: str
    args: Nest
    kwargs: Nest
    training: tuple[tuple[str, bool], ...]
    tensors: tuple[tuple[str, TensorSpec], ...]
    autocast: tuple[str | None, ...]
    torch_version: str
    block_bytes: int = 1
    fingerprint: str = ""
    output_gradients: OutputGradients = ANY_LOSS
    loss_bytes: int = 0
    repeated: tuple[tuple[int, int], ...] = ()
    resized: tuple[tuple[int, int], ...] = ()
    library_bytes: int = 0


def difference(planned: ModelRecord, found: ModelRecord) -> str | None:
    """The first thing, for people, in which a model and call differ from the planned ones.

    The fingerprints are not compared.
    """
    if planned.device != found.device:
        return f"it was made for the device {planned.device!r}, the model is on {found.device!r}"
    arguments = (
        *_argument_differences("argument", planned.args, found.args),
        *_argument_differences("argument", planned.kwargs, found.kwargs),
    )
    for message in arguments:
        return message
    for pair in planned.repeated:
        if pair not in found.repeated:
            return f"arguments {pair[1]} and {pair[0]} were planned as one tensor and are two"
    for pair in found.repeated:
        if pair not in planned.repeated:
            return f"arguments {pair[1]} and {pair[0]} were planned as two tensors and are one"
    modes = dict(found.training)
    for name, training in planned.training:
        if name in modes and modes[name] != training:
            mode, other = ("train", "eval") if training else ("eval", "train")
            owner = f"module {name!r}" if name else "the model"
            return f"{owner} was planned in {mode} mode and is in {other} mode"
    for message in _tensor_differences(planned, found):
        return message
    if planned.autocast != found.autocast:
        return f"autocast was {planned.autocast} (cpu, cuda) when planned and is {found.autocast}"
    return None


def _tensor_differences(planned: ModelRecord, found: ModelRecord) -> Iterator[str]:
    here, there = dict(found.tensors), dict(planned.tensors)
    for name, spec in planned.tensors:
        if name not in here:
            yield f"the planned {planned.model} has a parameter or buffer {name!r}, this has none"
        elif here[name] != spec:
            yield f"{name!r} was planned as {spec} and is {here[name]}"
    for name, _ in found.tensors:
        if name not in there:
            yield f"this model has a parameter or buffer {name!r}, the planned {planned.model} none"


def _argument_differences(place: str, planned: Argument, found: Argument) -> Iterator[str]:
    if isinstance(planned, Nest) and isinstance(found, Nest):
        same = (planned.kind, len(planned.items), planned.keys)
        if same != (found.kind, len(found.items), found.keys):
            yield f"{place}: planned {_shown(planned)}, got {_shown(found)}"
            return
        names = planned.keys or range(len(planned.items))
        for name, one, other in zip(names, planned.items, found.items, strict=True):
            yield from _argument_differences(f"{place} {name!r}", one, other)
    elif not _same_leaf(planned, found):
        yield f"{place}: planned {planned}, got {found}"


def _shown(nest: Nest) -> str:
    return f"the names {', '.join(nest.keys)}" if nest.keys else str(nest)


def _same_leaf(planned: Argument, found: Argument) -> bool:
    if isinstance(planned, Plain) and isinstance(found, Plain):
        if type(planned.value) is not type(found.value):
            return False
        both = (planned.value, found.value)
        return both[0] == both[1] or all(isinstance(x, float) and math.isnan(x) for x in both)
    return planned == found
