"""Random training steps of equal layers, for tests of folding and of the bound by groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind


def repeated_graph(
    rng: Random, layers: int, places: int, implementations: bool = False, results: bool = True
) -> Graph:
    """Layers that read of themselves, of the layer before, and of tensor 1, from outside.

    Args:
        rng: of what reads what, sizes and seconds.
        layers: how many.
        places: operators of a layer's forward, and of its backward.
        implementations: whether some have another implementation.
        results: whether each layer gives a gradient that the step keeps.
    """
    tensors = [Tensor("x", rng.randint(1, 4)), Tensor("shared", rng.randint(1, 4))]
    operators = [Operator("load", (), (0, 1), 1.0)]
    sizes = [rng.randint(1, 5) for _ in range(places)]
    reads = [[rng.random() < 0.5 for _ in range(place)] for place in range(places)]
    seconds = [float(rng.randint(1, 4)) for _ in range(2 * places)]
    outside = [rng.random() < 0.3 for _ in range(2 * places)]
    other = [implementations and rng.random() < 0.5 for _ in range(places)]
    random = [rng.random() < 0.15 for _ in range(places)]
    made: list[list[int]] = []
    for layer in range(layers):
        own = list(range(len(tensors), len(tensors) + places))
        before = made[-1][-1] if made else 0
        tensors += [Tensor(f"t{place}_{layer}", sizes[place]) for place in range(places)]
        for place in range(places):
            read = [own[p] for p in range(place) if reads[place][p]] or [before]
            read += [1] if outside[place] else []
            faster = Implementation("other", seconds[place] + 1, reads=tuple(read[:1]))
            one = Operator(f"f{place}_{layer}", tuple(read), (own[place],), seconds[place])
            one = replace(one, implementations=(faster,) if other[place] else ())
            operators.append(replace(one, random=random[place]))
        made.append(own)
    gradient = len(tensors)
    tensors.append(Tensor("tangent", 1, TensorKind.GRADIENT))
    kept, used = list[int](), [*(rng.random() < 0.7 for _ in range(places - 1)), True]
    after = gradient
    for layer in reversed(range(layers)):
        for place in reversed(range(places)):
            t = len(tensors)
            tensors.append(Tensor(f"g{place}_{layer}", rng.choice([1]), TensorKind.GRADIENT))
            read = [after] + ([made[layer][place]] if used[place] else [])
            read += [1] if outside[places + place] else []
            written = [t]
            if results and place == 0:
                tensors.append(Tensor(f"w_{layer}", 2, TensorKind.GRADIENT))
                written.append(t + 1)
                kept.append(t + 1)
            backward = Operator(
                f"b{place}_{layer}", tuple(read), tuple(written), seconds[places + place]
            )
            operators.append(replace(backward, phase=Phase.BACKWARD))
            after = t
    return Graph(
        tensors,
        operators,
        outputs=(made[-1][-1],),
        gradients=(after, *kept),
        tangents=(gradient,),
    )
