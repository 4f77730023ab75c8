"""The step of a model whose frozen weights are held in 4 bits, from the step with adapters.

QLoRA (Dettmers et al., arXiv:2305.14314) stores a weight in 4 bits, with an 8-bit scale for each 64
elements and a 32-bit one for each 256 of those, and dequantizes it whenever it is read, in the
backward again.
"""

from __future__ import annotations

from dataclasses import replace

from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Tensor, TensorKind
from memopt.pricing.flops import Work
from memopt.pricing.roofline import work_time_s

_GROUP, _GROUPS = 64, 256
_FROZEN, _BESIDE = ".base.weight", ".narrow.weight"
"""Names of a weight with an adapter, and of a part of the adapter; see `adapters.Adapted`."""


def in_four_bits(graph: Graph, element_bytes: int, device: Device) -> Graph:
    """Return the step with its adapters' frozen weights in 4 bits.

    An operator that is priced by its bytes and never run makes a weight before each operator that
    reads it."""
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
