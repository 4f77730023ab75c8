"""Where linearize puts backward operators that may wait."""

from __future__ import annotations

from memopt.models.graph import Operator, Phase
from memopt.reductions.linearize import linearize
from tests.reductions.test_linearize import perceptron


def test_a_small_result_does_not_hold_its_gradient_back() -> None:
    """A bias's gradient reads δ alone and writes more than it ends; δ's other reader has run, so
    that waiting would hold all of δ to the end of the backward."""
    build = perceptron(layers=4, size=100)
    build.backward()
    operators = []
    for operator in build.operators:
        deltas = [t for t in operator.reads if build.tensors[t].size_bytes == 100]
        if operator.phase is Phase.BACKWARD and len(operator.writes) > 1:
            bias = build.tensor("bias gradient", 2)
            build.gradients.append(bias)
            name = f"sum.{len(operators)}"
            operators.append(Operator(name, (deltas[0],), (bias,), 1.0, phase=Phase.BACKWARD))
        operators.append(operator)
    build.operators = operators
    lin = linearize(build.graph(tangents_held=False))
    assert [stage.gradient_bytes for stage in lin.chain.stages] == [100, 100, 100, 100, 0]
