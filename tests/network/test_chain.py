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


def test_collectives_of_the_backward_keep_their_order_across_stages() -> None:
    """The gradient of a layer's weight needs what the layer saved, that of its bias does not, and
    would be sent a stage earlier."""
    given, left = TensorKind.INPUT, TensorKind.OUTPUT
    sizes = {"inner": 900, "y": 100, "z": 100, "dz": 100, "dy": 100, "dw": 90, "dw sent": 9}
    sizes |= {"db": 2, "db sent": 1, "dx": 100}
    tensors = [Tensor("x", 100, given), *(Tensor(name, size) for name, size in sizes.items())]
    x, inner, y, z, dz, dy, dw, dw_sent, db, db_sent, dx = range(len(tensors))
    tensors[z] = Tensor("z", 100, left)
    scatter = Collective(CollectiveKind.REDUCE_SCATTER, 8, 90)
    back = Phase.BACKWARD
    operators = [
        Operator("inner", (x,), (inner,), 5.0),
        Operator("y", (inner,), (y,), 5.0),
        Operator("z", (y,), (z,), 5.0),
        Operator("dy", (dz, y), (dy,), 5.0, 0, back),
        Operator("dw", (dy, inner), (dw,), 5.0, 0, back),
        Operator("db", (dy,), (db,), 5.0, 0, back),
        Operator("send dw", (dw,), (dw_sent,), 1.0, 0, back, collective=scatter),
        Operator("send db", (db,), (db_sent,), 1.0, 0, back, collective=scatter),
        Operator("dx", (dy, inner), (dx,), 5.0, 0, back),
    ]
    graph = Graph(tensors, operators, (z,), (dw_sent, db_sent, dx), (dz,))
    stages = linearize(graph).stages
    order = [i for stage in reversed(stages) for i in stage.backward]
    assert len(stages) > 1
    assert [i for i in order if graph.operators[i].collective] == [6, 7]
