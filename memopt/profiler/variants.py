"""Steps of a model as it could be trained instead: in another dtype, with adapters, with its loss
in chunks. Each is captured with few of its equal blocks, and priced for a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from memopt.errors import CaptureError
from memopt.kernels.attach import with_implementations
from memopt.kernels.cross_entropy import attach as attach_chunks
from memopt.models.device import Device, in_blocks
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.optimizer_names import update_bytes
from memopt.pricing.flops import Work
from memopt.pricing.roofline import work_time_s
from memopt.profiler.adapters import Adapted, adapted
from memopt.profiler.shallow import (
    BlockList,
    WholeFigures,
    block_lists,
    meta_copy,
    whole_figures,
)
from memopt.step.more_blocks import UnequalBlocksError, with_more_blocks
from memopt.step.movable import movable_graph
from memopt.step.optimizer_state import OptimizerState
from memopt.step.profiled import Profiled
from memopt.step.shards import local_part
from memopt.torch_private import pytree

_CHUNKED = "chunked"


@dataclass(frozen=True)
class StepVariant:
    """The changes of a step from the user's own.

    Attributes:
        dtype: of parameters and floating inputs; None: the model's own.
        rank: of adapters beside frozen weights; 0: none, everything is trained as it is.
        quantized: whether weights beside adapters are held in 4 bits.
        ranks: devices over which the parameters are sharded.
        tiled: whether operators that work token by token run on some tokens at a time.
    """

    dtype: str | None = None
    rank: int = 0
    quantized: bool = False
    ranks: int = 1
    tiled: bool = False


@dataclass(frozen=True)
class VariantStep:
    """A step of the whole model.

    Attributes:
        graph: of one rank's step; optimizer state is not charged.
        chunked: the same with the loss in chunks; None: it has no such loss.
        notes: for the user.
        copies: the model with few blocks, and the lists of its blocks, to count by.
    """

    graph: Graph
    chunked: Graph | None
    notes: tuple[str, ...]
    copies: tuple[nn.Module, tuple[BlockList, ...]]
    device: Device

    def with_optimizer(self, name: str | None) -> WholeFigures:
        """Count the parameters and the state of an optimizer."""
        return _figures(*self.copies, name, self.device)


Price = Callable[[nn.Module, Any, str], Profiled]
"""Captures and prices a model's step with these inputs and kernels."""
Shard = Callable[[nn.Module, int], AbstractContextManager[nn.Module]]
"""Spreads a model over ranks that need not exist."""


class Variants:
    """The steps of a model's variants, each made once; the model stays as it is."""

    def __init__(
        self, model: nn.Module, inputs: Any, device: Device, price: Price, shard: Shard
    ) -> None:
        self._model, self._inputs, self._device = model, inputs, device
        self._price, self._shard = price, shard
        self.lists = block_lists(model)
        self.step = lru_cache(maxsize=None)(self._step)

    def movable(self, variant: StepVariant, optimizer: str | None) -> Graph:
        """Return a variant's whole step, whose parameters and state may live on the host; of one
        with adapters the step up to its gradients, whose frozen weights may."""
        step = self.step(variant)
        state = step.with_optimizer(optimizer).state
        if variant.rank:
            held = step.graph.extra_resident_bytes + state.bytes_total
            movable = frozen_weights(step.graph)
            return replace(step.graph, movable=movable, extra_resident_bytes=held)
        return whole_step(step.graph, state, self._device)

    def _step(self, variant: StepVariant) -> VariantStep:
        """Return a variant's step.

        Raises:
            CaptureError, ValueError: it cannot be captured; see `memopt.plan`.
        """
        if variant.quantized:
            return self._in_four_bits(self.step(replace(variant, quantized=False)))
        shallow = tuple(one for one in self.lists if one.more)
        if shallow:
            try:
                return self._made(variant, shallow)
            except (UnequalBlocksError, CaptureError, IndexError):
                pass  # the whole model says what is wrong, if anything is
        return self._made(variant, ())

    def _in_four_bits(self, step: VariantStep) -> VariantStep:
        frozen = next(m for m in step.copies[0].modules() if isinstance(m, Adapted)).base
        size = next(frozen.parameters()).element_size()
        chunked = step.chunked and in_four_bits(step.chunked, size, self._device)
        return replace(step, graph=in_four_bits(step.graph, size, self._device), chunked=chunked)

    def _made(self, variant: StepVariant, lists: tuple[BlockList, ...]) -> VariantStep:
        model, inputs = meta_copy(self._model, lists), self._inputs
        if variant.dtype is not None:
            dtype = getattr(torch, variant.dtype)
            model = model.to(dtype)
            inputs = pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs
            )
        if variant.rank:
            paths = [one.path for one in self.lists]
            model = adapted(model, variant.rank, inside=paths)
        with self._shard(model, variant.ranks) as built:
            profiled = self._price(built, inputs, "tiled" if variant.tiled else "aten")
            family = (("cross-entropy", attach_chunks),)
            chosen = with_implementations(profiled, families=family, device=self._device)
            graphs = [profiled.graph]
            if any(x.implementations for x in chosen.graph.operators):
                graphs.append(with_chosen(chosen.graph, _CHUNKED))
            for one in lists:
                kept = one.count - one.more
                graphs = [with_more_blocks(graph, one.path, kept, one.more) for graph in graphs]
            whole = _figures(built, lists, None, self._device).parameter_bytes
            lacking = [_parameter_bytes(graph) for graph in graphs]
            few = _figures(built, (), None, self._device).parameter_bytes
            unread = few - _parameter_bytes(profiled.graph)
        if any(whole - unread != size for size in lacking):
            raise UnequalBlocksError
        if unread > 0:
            more = [graph.extra_resident_bytes + unread for graph in graphs]
            graphs = [
                replace(g, extra_resident_bytes=size) for g, size in zip(graphs, more, strict=True)
            ]
        chunked = graphs[1] if len(graphs) > 1 else None
        copies = built, lists
        return VariantStep(graphs[0], chunked, profiled.notes, copies, self._device)


def _figures(
    model: nn.Module, lists: tuple[BlockList, ...], optimizer: str | None, device: Device
) -> WholeFigures:
    def size_of(parameter: torch.Tensor) -> int:
        return device.allocated_bytes(local_part(parameter).nbytes)

    return whole_figures(model, lists, optimizer, size_of, device.block_bytes)


def _parameter_bytes(graph: Graph) -> int:
    return sum(t.size_bytes for t in graph.tensors if t.kind is TensorKind.PARAMETER)


def with_chosen(graph: Graph, name: str) -> Graph:
    """Return the graph whose operators run by the implementation of this name where they have it,
    by their own elsewhere. Operators whose results nothing reads then are left out."""
    chosen = [_by(operator, name) for operator in graph.operators]
    wanted = {*graph.outputs, *graph.gradients}
    kept: list[Operator] = []
    for operator in reversed(chosen):
        if operator.has_effects or not wanted.isdisjoint(operator.writes):
            kept.append(operator)
            wanted.update(operator.reads)
    kept.reverse()
    computed = {t for operator in kept for t in operator.writes}
    owned = tuple(t for t in graph.allocator_owned if t in computed)
    return replace(graph, operators=tuple(kept), allocator_owned=owned)


def _by(operator: Operator, name: str) -> Operator:
    way = next((one for one in operator.implementations if one.name == name), None)
    if way is None:
        return replace(operator, implementations=())
    return replace(
        operator,
        reads=operator.reads if way.reads is None else way.reads,
        writes=operator.writes if way.writes is None else way.writes,
        time_s=way.time_s,
        workspace_bytes=way.workspace_bytes,
        in_place=way.in_place,
        implementations=(),
    )


def whole_step(graph: Graph, state: OptimizerState, device: Device) -> Graph:
    """Give an estimated step an update of each trained parameter, priced by the bytes that it reads
    and writes (`update_bytes`); parameters and their optimizer state are movable.

    A gradient is matched to a parameter of its size; of several, the gradient made first to the
    parameter that the forward reads last. (Among a block's equal ones the match makes no difference
    to memory and time.)"""
    readers, producer, tensors = graph.readers, graph.producer, graph.tensors
    made, used = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for gradient in sorted(set(graph.gradients) & producer.keys(), key=producer.__getitem__):
        made[tensors[gradient].size_bytes].append(gradient)
    kept = {*graph.outputs, *graph.gradients}
    parameters = [
        t
        for t, tensor in enumerate(tensors)
        if tensor.kind is TensorKind.PARAMETER and readers[t] and t not in kept
    ]
    for parameter in sorted(parameters, key=lambda t: -readers[t][0]):
        used[tensors[parameter].size_bytes].append(parameter)
    pairs = [
        pair for size, listed in made.items() for pair in zip(listed, used[size], strict=False)
    ]
    pairs.sort(key=lambda pair: producer[pair[0]])
    total = sum(tensors[parameter].size_bytes for _, parameter in pairs)
    operators, states = list(graph.operators), dict[str, int]()
    for gradient, parameter in pairs:
        size = tensors[parameter].size_bytes
        held = in_blocks(state.bytes_total * size // total, device.block_bytes)
        name = tensors[parameter].name
        states |= {name: held} if held else {}
        work = Work("", "", 0.0, update_bytes(state.name, size, held))
        operators.append(
            Operator(
                f"update.{name}",
                (gradient, parameter),
                (),
                work_time_s(work, device),
                phase=Phase.UPDATE,
                recomputable=False,
                target="memopt.update",
            )
        )
    updated = {gradient for gradient, _ in pairs}
    results = tuple(t for t in graph.gradients if t not in updated)
    step = replace(graph, operators=tuple(operators), gradients=results)
    return movable_graph(step, tuple(parameters), states, charged=False)


_GROUP, _GROUPS = 64, 256
_FROZEN, _BESIDE = ".base.weight", ".narrow.weight"
"""Names of a weight with an adapter, and of a part of the adapter; see `adapters.Adapted`."""


def in_four_bits(graph: Graph, element_bytes: int, device: Device) -> Graph:
    """Return the step with its adapters' frozen weights in 4 bits.

    QLoRA (Dettmers et al., arXiv:2305.14314) stores a weight in 4 bits, with an 8-bit scale for
    each 64 elements and a 32-bit one for each 256 of those, and dequantizes it whenever it is read,
    again in the backward: by an operator that is priced by its bytes and never run."""
    tensors, operators = list(graph.tensors), list[Operator]()
    sizes: dict[int, int] = {}
    for index in frozen_weights(graph):
        tensor = tensors[index]
        packed = packed_bytes(tensor.size_bytes // element_bytes)
        held = sum(map(device.allocated_bytes, packed))
        sizes[index] = tensor.size_bytes
        tensors[index] = replace(tensor, size_bytes=held, kind=TensorKind.BUFFER)
    for operator in graph.operators:
        made: dict[int, int] = {}
        for weight in dict.fromkeys(operator.reads):
            if weight not in sizes:
                continue
            made[weight] = len(tensors)
            name = f"dequantized {len(tensors)}"
            tensors.append(Tensor(name, sizes[weight]))
            moved = sizes[weight] + tensors[weight].size_bytes
            operators.append(
                Operator(
                    name,
                    (weight,),
                    (made[weight],),
                    work_time_s(Work("", "", 0.0, moved, 1), device),
                    phase=operator.phase,
                    module=operator.module,
                    target="memopt.dequantized",
                )
            )
        reads = tuple(made.get(t, t) for t in operator.reads)
        operators.append(replace(operator, reads=reads) if made else operator)
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators))


def frozen_weights(graph: Graph) -> tuple[int, ...]:
    """Return the tensors of the weights that have an adapter."""
    names = {tensor.name for tensor in graph.tensors}
    return tuple(
        index
        for index, tensor in enumerate(graph.tensors)
        if tensor.kind is TensorKind.PARAMETER
        and tensor.name.endswith(_FROZEN)
        and tensor.name.removesuffix(_FROZEN) + _BESIDE in names
    )


def packed_bytes(elements: int) -> tuple[int, int]:
    """Return the bytes of a weight in 4 bits, and of its scales."""
    groups = -(-elements // _GROUP)
    return -(-elements // 2), groups + 4 * -(-groups // _GROUPS)
