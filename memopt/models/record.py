"""The model, its mode and the example call that a plan was made for, as plain data.

A plan file stores it, and applying a plan compares it with the model at hand, so that a refusal
names what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from memopt.models.arguments import Argument, Arguments, KeywordArguments, Nest, Plain, Spec
from memopt.models.codec import FLAT, NAME, SPARSE, Check, Columns, Line, Natural
from memopt.models.step_rules import PLAIN, StepRules

KERNELS = ("aten", "compiled", "auto", "tiled")
_HALVES = (None, "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """Gradients that the user's loss is known to give to the leaves of the model's output.

    Attributes:
        unused: positions of the leaves that get no gradient.
        strides: (position, strides) of gradients that arrive without gaps.
        held_bytes: live to the end of the step beside the gradients: larger tensors of which
            gradients of parameters and inputs are parts; and, where torch holds handed-over tensors
            (2.11), gradients that are copied on their way into the backward.
        dropped: positions of the tensors among the leaves that the loss does not read, and that the
            step therefore does not return.
    """

    unused: tuple[Natural, ...] = field(default=(), metadata={NAME: "unused_outputs"})
    strides: tuple[Annotated[tuple[int, tuple[int, ...]], Columns("position", "strides")], ...] = (
        field(default=(), metadata={NAME: "gradient_strides"})
    )
    held_bytes: Natural = field(default=0, metadata={NAME: "held_gradient_bytes"})
    dropped: tuple[Natural, ...] = field(
        default=(), metadata={**SPARSE, NAME: "outputs_not_returned"}
    )

    @property
    def refused(self) -> tuple[int, ...]:
        """Positions of the leaves that are returned and get no gradient."""
        return tuple(i for i in self.unused if i not in self.dropped)


ANY_LOSS = OutputGradients()
"""An unknown loss: every output may get a gradient, laid out as the output is."""


_Autocast = Annotated[
    tuple[str | None, ...],
    Check(
        "null, 'bfloat16' or 'float16' for each of cpu and accelerator",
        lambda row: len(row) == 2 and set(row) <= set(_HALVES),
    ),
]
_LARGEST_BLOCK_BYTES = 2**30
"""Limit of block sizes: no allocator's blocks are larger, and sizes in them would not add up."""
_BlockBytes = Annotated[
    int,
    Check(
        f"a whole number from 1 to {_LARGEST_BLOCK_BYTES}",
        lambda size: 1 <= size <= _LARGEST_BLOCK_BYTES,
    ),
]
_Kernels = Annotated[
    str, Check("'aten', 'compiled', 'auto' or 'tiled'", lambda kernels: kernels in KERNELS)
]
_Repeated = Annotated[
    tuple[int, int],
    Columns("position", "earlier position"),
    Check(
        "the positions of an argument and of an earlier one", lambda pair: 0 <= pair[1] < pair[0]
    ),
]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model, mode and example call that a plan was made for.

    Attributes:
        model: qualified name of the model's class, for people.
        device: the kind of its device, `device.type`.
        args: the positional arguments of the example call, a tuple.
        kwargs: its keyword arguments, a dict.
        training: (name of a sub-module, its training flag), the model itself being "".
        tensors: (name, description) of every parameter and buffer.
        autocast: dtype of autocast on the CPU and on the accelerator; None: off.
        torch_version: the torch that captured it.
        block_bytes: the allocator's granularity in the captured graph.
        fingerprint: of the captured graph; "" if it was not captured.
        output_gradients: the gradients that the planned loss gives to the model's output.
        loss_bytes: of the planned loss itself, which lives from its step into the next one and is
            charged as resident, if it takes more than a number.
        library_bytes: kept by libraries on the device from step to step, charged as resident.
        resized: (tensor, its size as captured) of the graph's tensors that profiling found to
            have another size.
        accumulated_bytes: of gradients held when a step begins, charged as resident.
        look_bytes: of a look at the inputs' values before each step, charged as resident.
        dropped_bytes: of gradients held until the backward begins, charged until then.
        ranks: how many processes hold parts of its parameters.
        kernels: the choice of kernels, see `memopt.plan`.
        aten_regions: keys of the regions that stay ATen's although kernels are compiled.
        rules: micro-batches, clipping and scaling of a whole step.
        channels_last: whether its images are in channels-last order, as compiled kernels have them.
        repeated: (position, earlier position) of each flat argument that is the same tensor as an
            earlier one.
    """

    model: Line
    device: str
    args: Arguments
    kwargs: KeywordArguments
    training: tuple[Annotated[tuple[str, bool], Columns("name", "value")], ...]
    tensors: tuple[Annotated[tuple[str, Spec], Columns("name", "value")], ...]
    autocast: _Autocast
    torch_version: Line
    block_bytes: _BlockBytes = 1
    fingerprint: str = ""
    output_gradients: OutputGradients = field(default=ANY_LOSS, metadata=FLAT)
    loss_bytes: Natural = 0
    repeated: tuple[_Repeated, ...] = ()
    resized: tuple[Annotated[tuple[Natural, Natural], Columns("tensor", "bytes")], ...] = field(
        default=(), metadata=SPARSE
    )
    library_bytes: Natural = field(default=0, metadata=SPARSE)
    kernels: _Kernels = field(default="aten", metadata=SPARSE)
    aten_regions: tuple[Line, ...] = field(default=(), metadata=SPARSE)
    channels_last: bool = field(default=False, metadata=SPARSE)
    accumulated_bytes: Natural = field(default=0, metadata=SPARSE)
    dropped_bytes: Natural = field(default=0, metadata=SPARSE)
    look_bytes: Natural = field(default=0, metadata=SPARSE)
    ranks: Natural = field(default=1, metadata=SPARSE)
    rules: StepRules = field(default=PLAIN, metadata=SPARSE)


def difference(planned: ModelRecord, found: ModelRecord) -> str | None:
    """Return the first difference, for people, between a model and call and the planned ones.

    The fingerprints are not compared.
    """
    if planned.device != found.device:
        return f"it was made for the device {planned.device!r}, the model is on {found.device!r}"
    if planned.ranks != found.ranks:
        return (
            f"it was made for a model over {planned.ranks} rank(s), this one is over "
            f"{found.ranks}: each rank's part has another size"
        )
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
        names = "on the CPU and the accelerator"
        return f"autocast was {planned.autocast} {names} when planned and is {found.autocast}"
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
