"""The chain of a step whose parameters are gathered."""

from __future__ import annotations

from memopt.models.collective import Collective, CollectiveKind
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.reductions.linearize import linearize


def test_a_small_shard_before_the_trunk_forbids_no_cuts() -> None:
    """A shard is cast, gathered and looked up in; each layer's sum is read by the next only, its
    inner result by the backward. The cast is smaller than every sum, and no place to cut."""
    layers = 4
    tensors = [Tensor("shard", 50, TensorKind.PARAMETER), Tensor("cast", 25)]
    operators = [Operator("cast", (0,), (1,), 1.0)]
    gather = Collective(CollectiveKind.ALL_GATHER, 8, 200)
    tensors.append(Tensor("sum 0", 100))
    operators.append(Operator("gather", (1,), (2,), 1.0, collective=gather))
    total = 2
    inner = []
    for k in range(layers):
        kind = TensorKind.OUTPUT if k == layers - 1 else TensorKind.ACTIVATION
        tensors += [Tensor(f"inner {k}", 9000), Tensor(f"sum {k + 1}", 100, kind)]
        inner.append(len(tensors) - 2)
        operators.append(Operator(f"inner {k}", (total,), (inner[-1],), 5.0))
        operators.append(Operator(f"sum {k}", (total, inner[-1]), (inner[-1] + 1,), 5.0))
        total = inner[-1] + 1
    tangent = gradient = len(tensors)
    tensors.append(Tensor("tangent", 100, TensorKind.GRADIENT))
    for k in reversed(range(layers)):
        tensors.append(Tensor(f"gradient {k}", 100, TensorKind.GRADIENT))
        reads = (gradient, inner[k])
        operators.append(
            Operator(f"backward {k}", reads, (len(tensors) - 1,), 5.0, 0, Phase.BACKWARD)
        )
        gradient = len(tensors) - 1
    graph = Graph(tensors, operators, (total,), (gradient,), (tangent,))
    # The layers and the loss; the cast and the gather are of the first.
    assert len(linearize(graph).chain) == layers + 1
