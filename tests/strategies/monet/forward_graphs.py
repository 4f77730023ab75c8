"""Small random graphs without a backward."""

from __future__ import annotations

from random import Random

from memopt.models.graph import Graph, Operator, Tensor, TensorKind


def forward_graph(rng: Random, operators: int, plain: bool = False) -> Graph:
    """A DAG whose operators may need scratch memory or may run only once. What nothing reads is a
    result, as are a few others. Unless it is plain, some operators write two tensors or may take
    over an operand's storage."""
    tensors = [Tensor("x", 3, TensorKind.INPUT)]
    made: list[int] = []
    rows: list[Operator] = []
    read: set[int] = set()
    for i in range(operators):
        number = rng.randint(1, 3) if made else 0
        reads = tuple(sorted({rng.choice(made[-8:]) for _ in range(number)})) or (0,)
        read.update(reads)
        writes = [len(tensors)]
        tensors.append(Tensor(f"t{i}", rng.randint(1, 9)))
        if not plain and rng.random() < 0.15:
            writes.append(len(tensors))
            tensors.append(Tensor(f"u{i}", rng.randint(1, 5)))
        same = [t for t in reads if t and tensors[t].size_bytes == tensors[writes[0]].size_bytes]
        over = () if plain else tuple(t for t in same if rng.random() < 0.5)
        rows.append(
            Operator(
                f"op{i}",
                reads,
                tuple(writes),
                float(rng.randint(1, 9)),
                rng.choice((0, 0, 2)),
                recomputable=rng.random() < 0.9,
                in_place=over,
            )
        )
        made += writes
    results = [t for t in made if t not in read or rng.random() < 0.05]
    return Graph(tensors, rows, outputs=results)
