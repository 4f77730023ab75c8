"""Small random training steps with alternatives."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind


def training_graph(rng: Random, forward: int, alternatives: bool) -> Graph:
    """A forward DAG with one output each, and one backward operator per forward one.

    With alternatives, forward operators get slower or faster kernels, some write a small mask
    too, and their backward may read the mask, the output or the input instead.
    """
    tensors = [Tensor("x", 0, TensorKind.INPUT)]
    operators: list[Operator] = []
    made: list[int] = []
    mask: dict[int, int] = {}

    def tensor(name: str, most: int = 9, kind: TensorKind = TensorKind.ACTIVATION) -> int:
        tensors.append(Tensor(name, rng.randint(1, most), kind))
        return len(tensors) - 1

    inputs: list[tuple[int, ...]] = []
    for i in range(forward):
        reads = {made[-1]} if made else {0}
        if len(made) > 1 and rng.random() < 0.4:
            reads.add(rng.choice(made))
        inputs.append(tuple(sorted(reads)))
        out = tensor(f"a{i}")
        choices: list[Implementation] = []
        if alternatives and rng.random() < 0.5:
            choices.append(Implementation("other", rng.randint(1, 9), rng.randint(0, 4)))
        if alternatives and rng.random() < 0.4:
            mask[i] = tensor(f"m{i}", 2)
            writes = (out, mask[i])
            choices.append(
                Implementation("masked", rng.randint(1, 9), 0, writes=writes, packed=True)
            )
        operators.append(
            Operator(
                f"f{i}",
                inputs[i],
                (out,),
                rng.randint(1, 9),
                rng.randint(0, 3),
                recomputable=rng.random() < 0.9,
                implementations=tuple(choices),
            )
        )
        made.append(out)
    tangent = tensor("dy", 4, TensorKind.GRADIENT)
    gradient = tangent
    for i in reversed(range(forward)):
        sides = [inputs[i], (made[i],), (*inputs[i], made[i])]
        choices = []
        if alternatives and rng.random() < 0.5:
            reads = tuple(dict.fromkeys((gradient, *rng.choice(sides))))
            choices.append(
                Implementation("side", rng.randint(1, 9), rng.randint(0, 3), reads=reads)
            )
        if i in mask:
            packed = (gradient, mask[i])
            choices.append(Implementation("mask", rng.randint(1, 9), 0, reads=packed, packed=True))
        reads = tuple(dict.fromkeys((gradient, *rng.choice(sides))))
        new = tensor(f"g{i}", 5, TensorKind.GRADIENT)
        operators.append(
            Operator(
                f"b{i}",
                reads,
                (new,),
                rng.randint(1, 9),
                rng.randint(0, 3),
                phase=Phase.BACKWARD,
                implementations=tuple(choices),
            )
        )
        gradient = new
    return Graph(
        tensors,
        operators,
        outputs=(made[-1],),
        gradients=(gradient,),
        tangents=(tangent,),
        tangents_held=False,
    )


def in_place_graph(rng: Random, forward: int) -> Graph:
    """A training step whose operators may all take over what they read."""
    graph = training_graph(rng, forward, False)
    tensors = [t if t.resident else replace(t, size_bytes=4) for t in graph.tensors]
    fixed = graph.resident | set(graph.tangents)
    operators = [
        replace(op, workspace_bytes=0, in_place=tuple(t for t in op.reads if t not in fixed))
        for op in graph.operators
    ]
    return replace(graph, tensors=tensors, operators=operators)


def with_one_gradient_choices(graph: Graph, rng: Random) -> Graph:
    """The graph with a parameter gradient beside every input gradient, and for each of the two an
    implementation that writes it alone, as convolutions have."""
    tensors, operators, results = list(graph.tensors), [], list(graph.gradients)
    for operator in graph.operators:
        if operator.phase is not Phase.BACKWARD:
            operators.append(operator)
            continue
        tensors.append(Tensor(f"w{operator.name}", rng.randint(1, 4), TensorKind.GRADIENT))
        results.append(len(tensors) - 1)
        some = rng.sample(operator.reads, rng.randint(1, len(operator.reads)))
        operators.append(
            replace(
                operator,
                writes=(*operator.writes, results[-1]),
                implementations=(
                    Implementation("input gradient", rng.randint(1, 4), writes=operator.writes),
                    Implementation(
                        "weight gradient", rng.randint(1, 4), 0, tuple(some), (results[-1],)
                    ),
                ),
            )
        )
    return Graph(
        tensors,
        operators,
        outputs=graph.outputs,
        gradients=results,
        tangents=graph.tangents,
        tangents_held=graph.tangents_held,
    )
