"""Graphs refuse what cannot be, and know their readers, producers and results."""

import math
from dataclasses import replace as with_fields

import pytest

from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.instances import three_layers

GRAPH = three_layers()


def rebuilt(**fields):
    names = ("tensors", "operators", "outputs", "gradients", "tangents")
    return Graph(**{**{name: getattr(GRAPH, name) for name in names}, **fields})


def with_operator(index, **fields):
    operators = list(GRAPH.operators)
    operators[index] = with_fields(operators[index], **fields)
    return rebuilt(operators=operators)


def other(**fields):
    return (Implementation("other", 1.0, **fields),)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Tensor("t", -1), "Tensor 't': size_bytes must be at least 0 bytes, got -1"),
        (lambda: Tensor("t", 1.5), "must be a whole number of bytes, got 1.5"),
        (lambda: Tensor("t", True), "must be a whole number of bytes"),
        (lambda: Operator("f", (), (), -1.0), "Operator 'f': time_s must be a finite number"),
        (lambda: Operator("f", (), (), math.nan), "must be a finite number of seconds"),
        (lambda: Operator("f", (), (), math.inf), "must be a finite number of seconds"),
        (lambda: Operator("f", (), (), 1.0, -5), "workspace_bytes must be at least 0"),
        (lambda: Operator("f", (), (1, 1), 1.0), "writes lists a tensor twice"),
        (lambda: Implementation("i", math.nan), "Implementation 'i': time_s"),
        (lambda: Implementation("i", 1.0, -1), "workspace_bytes must be at least 0"),
        (lambda: rebuilt(boundary_bytes=-1), "Graph: boundary_bytes"),
        (lambda: rebuilt(extra_resident_bytes=0.5), "Graph: extra_resident_bytes"),
        (lambda: rebuilt(outputs=(99,)), "result tensor 99 is never computed"),
        (lambda: rebuilt(gradients=(-1,)), "result tensor -1 is never computed"),
        (lambda: rebuilt(tangents=(99,)), "there is no tensor 99, a tangent"),
        (lambda: rebuilt(tangents=(1,)), "the tangent 'w1' cannot be resident"),
        (lambda: rebuilt(tangents=()), "'layer3 backward': reads 'dy' before anything writes it"),
        (lambda: rebuilt(tangents=(7, 8)), "'d2' cannot be written here"),
        (lambda: with_operator(1, name="layer1"), "'layer1': the name is used twice"),
        (lambda: with_operator(1, reads=(13,)), "there is no tensor 13"),
        (lambda: with_operator(1, reads=(-1,)), "there is no tensor -1"),
        (lambda: with_operator(1, reads=(6,)), "reads 'y' before anything writes it"),
        (lambda: with_operator(1, reads=(7,)), "a forward operator reads a tangent"),
        (lambda: with_operator(1, writes=(4,)), "'a1' cannot be written here"),
        (lambda: with_operator(1, writes=(5, 2)), "'w2' cannot be written here"),
        (lambda: with_operator(0, phase=Phase.BACKWARD), "a forward operator after the first"),
        (lambda: with_operator(1, implementations=other() * 2), "'other': the name is used twice"),
        (lambda: with_operator(1, implementations=other(reads=(13,))), "there is no tensor 13"),
        (lambda: with_operator(1, implementations=other(writes=(-1,))), "there is no tensor -1"),
        (lambda: with_operator(1, implementations=other(writes=(1,))), "'w1' cannot be written"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_is_written_back_is_an_output_that_nothing_reads() -> None:
    tensors = [*GRAPH.tensors, Tensor("new", 8)]
    count = Operator("count", (4,), (13,), 0.0)
    operators = [*GRAPH.operators[:3], count, *GRAPH.operators[3:]]

    def made(outputs: tuple[int, ...] = (6, 13), count: int | None = None, **more) -> Graph:
        return Graph(tensors, operators[:count], outputs, written_back=(13,), **more)

    graph = made(gradients=GRAPH.gradients, tangents=GRAPH.tangents)
    assert graph.kept == {*GRAPH.kept, 13}
    assert graph.kept_to_end == GRAPH.kept
    for wrong in ({"outputs": (6,)}, {"gradients": (13,)}):
        with pytest.raises(ValueError, match="tensor 13 is written back"):
            made(**{"gradients": GRAPH.gradients, "tangents": GRAPH.tangents} | wrong)
    operators[4] = with_fields(operators[4], reads=(*operators[4].reads, 13))
    with pytest.raises(ValueError, match="13 is written back"):
        made(gradients=GRAPH.gradients, tangents=GRAPH.tangents)
    operators[4] = GRAPH.operators[3]
    with pytest.raises(ValueError, match="at a loss boundary; there is none"):
        made(count=4)


def test_derived_properties():
    assert GRAPH.resident == {0, 1, 2, 3}
    assert GRAPH.resident_bytes == 964
    assert rebuilt(extra_resident_bytes=36).resident_bytes == 1000
    assert GRAPH.producer == {4: 0, 5: 1, 6: 2, 8: 3, 9: 3, 10: 4, 11: 4, 12: 5}
    assert GRAPH.readers[4] == (1, 4)
    assert GRAPH.readers[0] == (0, 5)
    assert GRAPH.readers[12] == ()
    assert GRAPH.first_backward == 3
    assert GRAPH.compute_time_s == 11
    assert GRAPH.kept == {6, 7, 9, 11, 12}
    assert rebuilt(tangents_held=False).kept == {6, 9, 11, 12}


def test_forward_only():
    graph = Graph(GRAPH.tensors, GRAPH.operators[:3], outputs=(6, 1))
    assert graph.first_backward == 3
    assert graph.kept == {6}, "a parameter that is returned is resident all the same"


def test_a_tensor_read_twice_by_one_operator_has_one_reader():
    graph = Graph([Tensor("x", 1, TensorKind.INPUT)], [Operator("square", (0, 0), (), 1.0)])
    assert graph.readers == ((0,),)


def test_graphs_are_values():
    assert three_layers() == GRAPH
    assert hash(three_layers()) == hash(GRAPH)
    with pytest.raises(AttributeError):
        GRAPH.outputs = ()
