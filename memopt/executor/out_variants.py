"""Out variants: kernel calls that write their results at given addresses.

A native variant is the `out=` overload of the same operator, where the device has a kernel for it
(the overloads that torch generates compute first and then copy, which costs the tensor again).
A composed variant is made of other kernels, see `composed_variants`. A variant is used only if, on
stand-in data in the call's own layouts, it writes the same bits as the kernel returns
(`memopt.step.trial`). Results without a variant are allocated by their kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from memopt.executor.composed_variants import EVERYWHERE, ON_CPU
from memopt.pricing.workspace import with_state
from memopt.step.backend import backend_of, estimated_backend, is_on_host
from memopt.step.build import Lowering
from memopt.step.dropout import EAGER_DROPOUT
from memopt.step.memory_layout import fills_storage, storage_of
from memopt.step.nodes import tensors_of
from memopt.step.profiled import Profiled
from memopt.step.signature import Arguments, signature, values_of
from memopt.step.trial import poisoned, same_bits
from memopt.step.updates import in_place_twin, written_into
from memopt.torch_private.operators import OpOverload, aten, has_kernel, schema_of
from memopt.user_code.aside import aside


@dataclass(frozen=True)
class OutVariant:
    """A call that writes into given tensors: `target(*args, **kwargs, **{name: tensor})`.

    Attributes:
        target: the callable, which takes the kernel call's own arguments.
        names: the keyword of each tensor to write to, by position in the kernel's result.
        composed: whether memopt composed it; else it is torch's `out=` overload.
    """

    target: Callable[..., Any]
    names: tuple[str, ...]
    composed: bool

    @property
    def label(self) -> str:
        """Name of the callable in generated code."""
        if self.composed:
            return f"into_{self.target.__name__.strip('_')}"
        return "".join(c if c.isalnum() else "_" for c in str(self.target))


def out_variant_of(node: Node, device: torch.device | None) -> OutVariant | None:
    """Return the variant of a kernel call; None if its kernel allocates its results itself.

    Args:
        node: the call.
        device: where the model runs, and the variant is tried; None: nothing may be computed.
    """
    variant = _possible(node)
    if any(is_on_host(value, device) for value in tensors_of(node)):
        return None  # an arena is on the device
    if variant is None or device is None:
        return variant
    return variant if _gives_the_same(variant, node, device) else None


def _gives_the_same(variant: OutVariant, node: Node, device: torch.device) -> bool:
    """Return whether a variant writes the kernel's bits, tried on stand-in data. torch's overload
    first gets empty tensors to resize: one that makes them larger than the result (losses that
    write the terms of their sum) would also resize a slot."""
    call, likes = signature(node), values_of(node)

    def writes_the_same(make: Callable[[], list[torch.Tensor]]) -> bool:
        def written(arguments: Arguments) -> list[torch.Tensor]:
            args, kwargs = arguments
            into = make()
            variant.target(*args, **kwargs, **dict(zip(variant.names, into, strict=True)))
            return into

        return same_bits(call, likes, device, (variant.target, make.__name__), written)

    def empty() -> list[torch.Tensor]:
        return [torch.empty(0, dtype=like.dtype, device=device) for like in likes]

    def slots() -> list[torch.Tensor]:
        return poisoned(likes, device)

    return (variant.composed or writes_the_same(empty)) and writes_the_same(slots)


_COPYING = frozenset(
    (
        aten._fft_r2c.default,
        aten._fft_c2r.default,
        aten._fft_c2c.default,
    )
)
"""Operators whose `out=` kernels on CPU copy a temporary result (mkl/SpectralOps.cpp)."""


def _possible(node: Node) -> OutVariant | None:
    """Return the variant that a kernel call may have, by its kind."""
    values = values_of(node)
    if not all(isinstance(value, torch.Tensor) and _plain(value) for value in values):
        return None
    if len(set(map(storage_of, values))) < len(values):
        return None
    device = values[0].device.type
    variant = _variant(node.target, device)
    if variant is None or len(variant.names) != len(values):
        return None
    return variant if _suits(node) else None


@functools.cache
def _variant(target: Any, device: str) -> OutVariant | None:
    composed = EVERYWHERE.get(target) or (ON_CPU.get(target) if device == "cpu" else None)
    if composed is not None:
        return OutVariant(composed[0], composed[1], composed=True)
    twin = in_place_twin(target)
    if twin is not None:
        return OutVariant(written_into(twin), ("out",), composed=True)
    if not isinstance(target, OpOverload) or target in _COPYING:
        return None
    wanted = [(a.name, str(a.type)) for a in schema_of(target).arguments]
    for name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, name)
        arguments = schema_of(overload).arguments
        if [(a.name, str(a.type)) for a in arguments if not a.is_out] != wanted:
            continue
        outs = tuple(a.name for a in arguments if a.is_out)
        if outs and has_kernel(overload, backend_of(device).dispatch_key):
            return OutVariant(overload, outs, composed=False)
    return None


def _suits(node: Node) -> bool:
    """Return whether composed variants can run a call. They run no dropout, and no softmax, of an
    empty tensor; no dropout outside of training; and no fill with anything but a real number."""
    if node.target in (torch.ops.aten.native_dropout.default, EAGER_DROPOUT):
        return node.args[2] is not False and _tensor(node, 0).numel() > 0
    if node.target is aten._safe_softmax.default:
        return _tensor(node, 0).numel() > 0
    if node.target in (torch.ops.aten.full.default, torch.ops.aten.full_like.default):
        return isinstance(node.args[1], (int, float))
    return True


def _tensor(node: Node, position: int) -> torch.Tensor:
    argument = node.args[position]
    assert isinstance(argument, Node)
    value: torch.Tensor = argument.meta["val"]
    return value


def _plain(value: torch.Tensor) -> bool:
    """Return whether address, shape and strides describe a result completely."""
    strided = value.layout is torch.strided and not (value.is_conj() or value.is_neg())
    return strided and fills_storage(value)


@aside
def out_variants_of(lowering: Lowering) -> dict[Node, OutVariant]:
    """Return the variants of all kernel calls that have one, operators' alternatives included."""
    variants = {}
    for node in (*lowering.nodes, *lowering.alternatives.values()):
        variant = out_variant_of(node, lowering.device) if len(lowering.storages[node]) else None
        if variant is not None:
            variants[node] = variant
    return variants


def for_placing(profiled: Profiled) -> Profiled:
    """Return a profiled model whose graph lists the tensors that a placement must leave out."""
    backend = backend_of(profiled.torch_device)
    if profiled.record is not None and profiled.record.block_bytes > 1:
        backend = estimated_backend(profiled.record.block_bytes)
    graph = with_state(profiled.graph, backend, placed=True)
    return replace(
        profiled, graph=replace(graph, allocator_owned=allocator_owned(profiled.lowering))
    )


def allocator_owned(lowering: Lowering) -> tuple[int, ...]:
    """Return the computed tensors that no placement can give an address, ascending. Their kernel
    (under some implementation) has no variant or returns other storages than the operator writes,
    or they leave the step (results)."""
    graph = lowering.graph
    variants = out_variants_of(lowering)
    outside = set(graph.outputs) | set(graph.gradients)
    for index, operator in enumerate(graph.operators):
        choices = [(lowering.nodes[index], operator.writes)]
        for choice in operator.implementations:
            node = lowering.alternatives.get((index, choice.name))
            if node is not None and choice.writes is not None:
                choices.append((node, choice.writes))
        for node, writes in choices:
            if node not in variants or set(writes) != set(lowering.storages[node]):
                outside.update(writes)
    return tuple(sorted(outside & graph.computed))
