"""JSON documents: round trips, canonical bytes, strict reading."""

import json
import math
from dataclasses import replace as with_fields
from random import Random

import pytest

from memopt.errors import PlanFileError
from memopt.models.chain import Chain, Stage
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph, Implementation, Operator, Tensor
from memopt.models.instances import rotor_toy, three_layers
from memopt.models.steps import ChainStep, Move
from memopt.programs.instructions import Compute, Program
from memopt.programs.liveness import store_all
from memopt.programs.serialize import dumps, fingerprint, loads
from tests.random_programs import random_placement, random_program

STEPS = tuple(ChainStep(move, stage) for stage, move in enumerate(Move, 1))
DEVICE = Device(
    "A100",
    80 * 2**30,
    25e9,
    None,
    1e-5,
    False,
    {"float32": 19.5e12, "bfloat16": math.inf},
    2e12,
    4e-6,
    0.5,
    0.7,
    512,
    "data sheet",
)


@pytest.mark.parametrize("seed", range(60))
def test_round_trip_of_random_values(seed):
    rng = Random(seed)
    graph = random_graph(rng, rng.randint(1, 9), implementations=True, updates=seed % 2 == 0)
    program = random_program(rng, graph, recomputations=3, swaps=3)
    chain = random_chain(rng, rng.randint(1, 8), parameter_gradients=True, negative_overheads=True)
    for value in (graph, program, random_placement(rng, graph, program), chain):
        data = dumps(value)
        assert loads(data) == value
        assert dumps(loads(data)) == data
        assert fingerprint(graph) == fingerprint(loads(dumps(graph)))


def test_renamed_fields_have_their_old_names_in_files():
    graph = random_graph(Random(0), 3)
    owned = with_fields(graph, allocator_owned=tuple(graph.producer)[:1])
    program = Program([Compute(0, (1,))], [], unplaced=[(0, 1)])
    assert b'"outside":[' in dumps(owned)
    assert b'"apart":[[0,1]]' in dumps(program)
    assert (loads(dumps(owned)), loads(dumps(program))) == (owned, program)


@pytest.mark.parametrize(
    "value",
    [
        STEPS,
        (),
        Program([]),
        Program([Compute(0, (1,), "fast")], []),
        Device(),
        DEVICE,
        with_fields(DEVICE, from_host_bytes_per_s=math.inf, capacity_bytes=None),
        rotor_toy(),
        three_layers(),
        Graph([Tensor('quo"te \\ \n ∅ \ud800', 1)], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip(value):
    data = dumps(value)
    assert loads(data) == value
    assert loads(data.decode()) == value
    # Valid for a reader that knows no Infinity.
    json.loads(data, parse_constant=lambda name: pytest.fail(name))


def test_equal_values_give_equal_bytes():
    a = Operator("f", (), (0,), 1, workspace_bytes=2)
    b = Operator("f", (), (0,), 1.0, workspace_bytes=2)
    graphs = [Graph([Tensor("t", 1)], [operator]) for operator in (a, b)]
    assert graphs[0] == graphs[1]
    assert dumps(graphs[0]) == dumps(graphs[1])
    stages = [Stage(0, 1, 1, 1, 1), Stage(-0.0, 1.0, 1, 1, 1)]
    assert dumps(Chain(0, stages[:1])) == dumps(Chain(0, stages[1:]))
    rates = {"float32": 1e12, "bfloat16": 2e12}
    swapped = dict(reversed(rates.items()))
    assert dumps(Device(flops_per_s=rates)) == dumps(Device(flops_per_s=swapped))


def test_the_format_of_version_1_stays():
    assert dumps(STEPS[:1]) == (
        b'{"format":"memopt","kind":"steps","value":[["F\\u2205",1]],"version":1}'
    )
    program = store_all(three_layers()).instructions[2:6]
    assert json.loads(dumps(Program(program, [(0, 6, 512)])))["value"] == {
        "instructions": [
            ["compute", 2, [6], None],
            ["loss"],
            ["compute", 3, [8, 9], None],
            ["free", 5],
        ],
        "offsets": [[0, 6, 512]],
    }


def edited(value, *path_and_new):
    """The document of a value with one place changed, or removed."""
    *path, last, new = path_and_new
    document = json.loads(dumps(value))
    place = document
    for key in path:
        place = place[key]
    if new is KeyError:
        del place[last]
    else:
        place[last] = new
    return json.dumps(document)


GRAPH = three_layers()
PROGRAM = store_all(GRAPH)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "not a memopt file"),
        (b"\x80\x02", "not a memopt file"),
        ("[1", "not a memopt file"),
        ("[" * 100_000, "not a memopt file"),
        ("NaN", "NaN is not JSON"),
        ('{"a":1,"a":2}', "'a' is there twice"),
        ("[]", "document: expected an object"),
        ("{}", "not a memopt document"),
        ('{"format":"memopt"}', "version None, but this memopt reads version 1"),
        (edited(GRAPH, "format", "onnx"), "not a memopt document"),
        (edited(GRAPH, "version", 2), "version 2, but this memopt reads version 1"),
        (edited(GRAPH, "version", True), "document.version: expected a whole number"),
        (edited(GRAPH, "kind", "pickle"), "document.kind: expected one of chain, device"),
        (edited(GRAPH, "extra", 1), "document: there is no field 'extra'"),
        (edited(GRAPH, "value", KeyError), "document: the field 'value' is missing"),
        (edited(GRAPH, "value", "outputs", KeyError), "value: the field 'outputs' is missing"),
        (edited(GRAPH, "value", "more", 1), "value: there is no field 'more'"),
        (edited(GRAPH, "value", "tensors", {}), "value.tensors: expected a list"),
        (
            edited(GRAPH, "value", "tensors", 3, "size_bytes", 1.5),
            r"value.tensors\[3\].size_bytes: expected a whole number, found 1.5",
        ),
        (edited(GRAPH, "value", "tensors", 3, "size_bytes", True), "expected a whole number"),
        (edited(GRAPH, "value", "tensors", 3, "size_bytes", -1), "tensors.3.: Tensor 'w3'"),
        (edited(GRAPH, "value", "tensors", 3, "kind", "tape"), "expected one of 'input'"),
        (edited(GRAPH, "value", "operators", 0, "name", None), "expected a string"),
        (edited(GRAPH, "value", "operators", 0, "time_s", "inf"), "time_s: expected a number"),
        (edited(GRAPH, "value", "operators", 0, "time_s", 10**400), "expected a finite number"),
        (edited(GRAPH, "value", "operators", 0, "time_s", -1), "Operator 'layer1'"),
        (edited(GRAPH, "value", "operators", 0, "random", 0), "expected true or false"),
        (edited(GRAPH, "value", "operators", 0, "reads", [99]), "value: Graph.*no tensor 99"),
        (edited(GRAPH, "value", "operators", 0, "reads", ["0"]), r"reads\[0\]"),
        (edited(PROGRAM, "value", "instructions", 0, []), r"instructions\[0\]: expected an instr"),
        (edited(PROGRAM, "value", "instructions", 0, ["exec", "x"]), "expected an instruction"),
        (edited(PROGRAM, "value", "instructions", 0, ["free"]), "expected an instruction"),
        (edited(PROGRAM, "value", "instructions", 0, ["free", "1"]), "expected a whole number"),
        (edited(PROGRAM, "value", "instructions", 0, 5), "expected a list"),
        (edited(PROGRAM, "value", "offsets", [[1, 2]]), r"expected \[instruction, tensor, offset"),
        (edited(STEPS, "value", 0, ["F", 1]), "expected one of 'F∅'"),
        (edited(STEPS, "value", 0, ["F∅"]), r"expected \[move, stage\]"),
        (edited(rotor_toy(), "value", "stages", []), "at least one stage"),
        (edited(DEVICE, "value", "memory_bytes_per_s", "fast"), "memory_bytes_per_s: expected a n"),
        (edited(DEVICE, "value", "memory_bytes_per_s", 0), "must be positive"),
    ],
)
def test_what_is_wrong_is_named(data, message):
    with pytest.raises(PlanFileError, match=message):
        loads(data)


def test_long_values_are_shortened_in_messages():
    with pytest.raises(PlanFileError) as caught:
        loads(edited(GRAPH, "value", "tangents_held", "x" * 5000))
    assert len(str(caught.value)) < 200


def test_fingerprint_is_of_the_structure():
    def with_operator(**fields):
        operators = [with_fields(GRAPH.operators[0], **fields), *GRAPH.operators[1:]]
        return fingerprint(rebuilt(operators=operators))

    def rebuilt(**fields):
        names = ("tensors", "operators", "outputs", "gradients", "tangents")
        return Graph(**{**{name: getattr(GRAPH, name) for name in names}, **fields})

    same = fingerprint(GRAPH)
    assert len(same) == 64
    assert fingerprint(rebuilt(boundary_bytes=99, extra_resident_bytes=5)) == same
    assert with_operator(time_s=77.0, workspace_bytes=3) == same
    larger = [Tensor("x", 65, GRAPH.tensors[0].kind), *GRAPH.tensors[1:]]
    choice = Implementation("other", 1.0)
    different = [
        same,
        with_operator(name="other"),
        with_operator(reads=(0,)),
        with_operator(recomputable=False),
        with_operator(random=True),
        with_operator(implementations=(choice,)),
        with_operator(implementations=(with_fields(choice, exact=False),)),
        fingerprint(rebuilt(tensors=larger)),
        fingerprint(rebuilt(outputs=())),
        fingerprint(rebuilt(gradients=())),
        fingerprint(rebuilt(tangents_held=False)),
    ]
    assert len(set(different)) == len(different)


def test_fingerprint_does_not_change_between_versions():
    assert fingerprint(Graph([Tensor("t", 1)], [Operator("f", (), (0,), 1.0)])) == (
        "c5aa20dc8b6f560458ee99dbee7c0501db88667311edb50ba9a951692703a47a"
    )
