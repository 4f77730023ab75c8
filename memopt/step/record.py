"""Makes the record of a model and its example call that plans keep, and a call from a record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memopt.errors import PlanFileError
from memopt.models.arguments import Argument, Nest, Opaque, Plain, TensorSpec
from memopt.models.graph import Graph
from memopt.models.record import ANY_LOSS, ModelRecord, OutputGradients
from memopt.models.same_graph import resized
from memopt.models.step_rules import PLAIN, StepRules
from memopt.programs.serialize import fingerprint
from memopt.step.backend import autocast_state
from memopt.step.inputs import Call, repeated
from memopt.step.objects import Opened
from memopt.step.ranks import sharers_of
from memopt.torch_private import pytree

_LARGEST_EXAMPLE_BYTES = 2**44
"""Most bytes of one tensor of an example call; larger ones are not even reserved."""


def record_of(
    model: nn.Module,
    call: Call,
    device: torch.device,
    *,
    block_bytes: int = 1,
    graphs: tuple[Graph, Graph] | None = None,
    output_gradients: OutputGradients = ANY_LOSS,
    loss_bytes: int = 0,
    library_bytes: int = 0,
    kernels: str = "aten",
    aten_regions: tuple[str, ...] = (),
    rules: StepRules = PLAIN,
    channels_last: bool = False,
) -> ModelRecord:
    """Record a model in its present mode, and its example call."""
    named = (*model.named_parameters(), *model.named_buffers())
    args, kwargs = call.opened
    return ModelRecord(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        device=device.type,
        args=Nest("tuple", tuple(_argument(value) for value in args)),
        kwargs=Nest("dict", tuple(_argument(value) for value in kwargs.values()), tuple(kwargs)),
        training=tuple((name, module.training) for name, module in model.named_modules()),
        tensors=tuple((name, _spec(tensor)) for name, tensor in named),
        autocast=autocast_state(),
        torch_version=str(torch.__version__),
        block_bytes=block_bytes,
        fingerprint=fingerprint(graphs[0]) if graphs else "",
        output_gradients=output_gradients,
        loss_bytes=loss_bytes,
        repeated=tuple(repeated(call.leaves).items()),
        resized=resized(*graphs) if graphs else (),
        library_bytes=library_bytes,
        kernels=kernels,
        aten_regions=aten_regions,
        channels_last=channels_last,
        ranks=max(1, len(sharers_of(model))),
        rules=rules,
    )


def example_call(record: ModelRecord) -> Call:
    """Return a call with the recorded arguments; tensors hold zeros.

    Raises:
        PlanFileError: a tensor cannot be made here; the message says why.
    """
    args = tuple(_value(item) for item in record.args.items)
    values = [_value(item) for item in record.kwargs.items]
    call = Call(args, dict(zip(record.kwargs.keys, values, strict=True)))
    leaves = call.leaves
    for position, earlier in record.repeated:
        if position >= len(leaves):
            raise PlanFileError(f"the plan's call has no argument {position}; save the plan again")
        leaves[position] = leaves[earlier]
    return Call(*pytree.tree_unflatten(leaves, call.spec))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(tensor: torch.Tensor) -> TensorSpec:
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
    return TensorSpec(
        shape=tuple(tensor.shape),
        strides=strides,
        dtype=_name(tensor.dtype),
        device=tensor.device.type,
        requires_grad=tensor.requires_grad,
    )


def _argument(value: Any) -> Argument:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return Opaque(f"{value.layout} tensor")
        return _spec(value)
    if type(value) in (bool, int, float, str) or value is None:
        return Plain(value)
    if type(value) in (tuple, list):
        return Nest(type(value).__name__, tuple(_argument(item) for item in value))
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return Nest("dict", tuple(_argument(item) for item in value.values()), tuple(value))
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return Opaque(f"{type(value).__name__} with keys that are no strings")
    if isinstance(value, Opened):
        return _object(value.kind, value.names, value.values)
    parts = pytree.tree_leaves(value, is_leaf=lambda one: one is not value)
    if len(parts) == 1 and parts[0] is value:
        return Opaque(type(value).__name__)
    names = value if isinstance(value, dict) else getattr(value, "_fields", range(len(parts)))
    return _object(type(value), map(str, names), parts)


def _object(kind: type, names: Iterable[str], values: Iterable[Any]) -> Nest:
    text = f"{kind.__module__}.{kind.__qualname__}"
    return Nest(text, tuple(map(_argument, values)), tuple(names))


def _value(argument: Argument) -> Any:
    if isinstance(argument, TensorSpec):
        return _zeros(argument)
    if isinstance(argument, Plain):
        return argument.value
    if isinstance(argument, Nest):
        items = [_value(item) for item in argument.items]
        if argument.kind == "dict":
            return dict(zip(argument.keys, items, strict=True))
        if argument.kind in ("tuple", "list"):
            return tuple(items) if argument.kind == "tuple" else items
    raise PlanFileError(f"the plan's inputs contain {argument}: pass apply(model, inputs)")


def _zeros(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanFileError(f"the plan's inputs have the dtype {spec.dtype!r}, unknown to torch")
    last = [(n - 1) * stride for n, stride in zip(spec.shape, spec.strides, strict=True)]
    elements = 0 if 0 in spec.shape else 1 + sum(last)
    if elements * dtype.itemsize > _LARGEST_EXAMPLE_BYTES:
        raise PlanFileError(f"the plan's input {spec} is larger than any input can be")
    try:
        storage = torch.zeros(elements, dtype=dtype, device=spec.device)
        example = storage.as_strided(spec.shape, spec.strides)
        return example.requires_grad_(spec.requires_grad)
    except (RuntimeError, AssertionError, TypeError) as error:
        # AssertionError: torch without CUDA.
        reason = str(error).partition("\n")[0]
        raise PlanFileError(f"the plan's input {spec} cannot be made here: {reason}") from error
