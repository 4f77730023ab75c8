"""Chains of layers as graphs of joint's tests."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind


def chain_of(layers: int, size_bytes: int, seconds: float) -> Graph:
    """Layers x → x, each of whose backward operators reads what its forward read."""
    activations = [Tensor(f"a{i}", size_bytes) for i in range(layers + 1)]
    gradients = [Tensor(f"g{i}", 1, TensorKind.GRADIENT) for i in range(layers + 1)]
    first = [Operator("load", (), (0,), 1.0)]
    forward = [Operator(f"f{i}", (i,), (i + 1,), seconds) for i in range(layers)]
    base = layers + 1
    backward = [
        Operator(f"b{i}", (base + i + 1, i), (base + i,), seconds, phase=Phase.BACKWARD)
        for i in reversed(range(layers))
    ]
    return Graph(
        [*activations, *gradients],
        [*first, *forward, *backward],
        outputs=(layers,),
        gradients=(base,),
        tangents=(base + layers,),
    )


def blocks(layers: int, sizes: Sequence[int] | None = None) -> Graph:
    """Layers of two operators: a cheap one, whose result is large, and a dear one that reads it.

    Tensor 0 is the first layer's input, 2l + 1 and 2l + 2 what layer l makes, then gradients.

    Args:
        layers: how many.
        sizes: of each layer's large result, bytes; None: all alike.
    """
    large = [16] * layers if sizes is None else list(sizes)
    tensors = [Tensor("x0", 4)]
    operators = [Operator("load", (), (0,), 1.0)]
    for layer in range(layers):
        n = 2 * layer
        tensors += [Tensor(f"h{layer}", large[layer]), Tensor(f"x{layer + 1}", 4)]
        operators += [
            Operator(f"cheap_{layer}", (n,), (n + 1,), 1.0),
            Operator(f"dear_{layer}", (n + 1,), (n + 2,), 6.0),
        ]
    base = 2 * layers + 1
    tensors += [Tensor(f"g{layer}", 4, TensorKind.GRADIENT) for layer in range(layers + 1)]
    operators += [
        Operator(
            f"back_{layer}",
            (base + layer + 1, 2 * layer, 2 * layer + 1),
            (base + layer,),
            12.0,
            phase=Phase.BACKWARD,
        )
        for layer in reversed(range(layers))
    ]
    return Graph(
        tensors, operators, outputs=(2 * layers,), gradients=(base,), tangents=(base + layers,)
    )
