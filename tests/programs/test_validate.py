"""The validator names the exact code for every mutation of good plans."""

import ast
import importlib
import inspect
from dataclasses import replace as with_fields
from random import Random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor
from memopt.models.instances import three_layers
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import Violation, ViolationCode, memory_use, validate
from tests.models.training_graphs import writing_back

Code = ViolationCode
X, W1, W2, W3, A1, A2, Y, DY, D2, G3, D1, G2, G1 = range(13)


def training_graph() -> Graph:
    """Three layers; layer 2 has another implementation, layer 3 must run once, and the first
    weight is updated in the step."""
    graph = three_layers()
    operators = list(graph.operators)
    operators[1] = with_fields(operators[1], implementations=(Implementation("fast", 1.0, 70),))
    operators[2] = with_fields(operators[2], recomputable=False)
    operators.append(Operator("update", (W1, G1), (), 1.0, 0, Phase.UPDATE, recomputable=False))
    return Graph(graph.tensors, operators, graph.outputs, (G2, G3), graph.tangents)


GRAPH = training_graph()
GOOD = (
    Compute(0, (A1,)),
    Compute(1, (A2,), "fast"),
    SwapOut(A1),
    Free(A1),
    Compute(2, (Y,)),
    LossBoundary(),
    Compute(3, (D2, G3)),
    Free(A2),
    SwapIn(A1),
    Compute(4, (D1, G2)),
    Free(A1),
    Free(D2),
    DropHost(A1),
    Compute(0, ()),
    Compute(5, (G1,)),
    Free(D1),
    Compute(6, ()),
    Free(G1),
)


def insert(position, *instructions):
    return lambda good: [*good[:position], *instructions, *good[position:]]


def delete(position, count=1):
    return lambda good: [*good[:position], *good[position + count :]]


def change(position, instruction):
    return lambda good: [*good[:position], instruction, *good[position + 1 :]]


def move(source, target):
    """Take the instruction at `source` out and put it before position `target` of the rest."""
    return lambda good: insert(target, good[source])(delete(source)(good))


MUTATIONS = [
    ("not an instruction", change(7, "free"), Code.UNKNOWN_INSTRUCTION, 7),
    ("operator too large", change(0, Compute(7, (A1,))), Code.UNKNOWN_OPERATOR, 0),
    ("operator negative", change(0, Compute(-1, (A1,))), Code.UNKNOWN_OPERATOR, 0),
    ("tensor too large", change(7, Free(13)), Code.UNKNOWN_TENSOR, 7),
    ("tensor negative", change(2, SwapOut(-1)), Code.UNKNOWN_TENSOR, 2),
    (
        "implementation of another",
        change(0, Compute(0, (A1,), "fast")),
        Code.UNKNOWN_IMPLEMENTATION,
        0,
    ),
    ("keeps what it reads", change(1, Compute(1, (A1, A2))), Code.OUTPUT_NOT_WRITTEN, 1),
    ("keeps twice", change(0, Compute(0, (A1, A1))), Code.OUTPUT_REPEATED, 0),
    ("frees a parameter", insert(3, Free(W1)), Code.RESIDENT_MOVED, 3),
    ("swaps out the input", insert(0, SwapOut(X)), Code.RESIDENT_MOVED, 0),
    ("swaps in a parameter", insert(9, SwapIn(W2)), Code.RESIDENT_MOVED, 9),
    ("drops a parameter's copy", insert(9, DropHost(W2)), Code.RESIDENT_MOVED, 9),
    ("runs layer 3 again", insert(5, Compute(2, ())), Code.NOT_RECOMPUTABLE, 5),
    ("updates twice", insert(17, Compute(6, ())), Code.NOT_RECOMPUTABLE, 17),
    ("never updates", delete(16), Code.OPERATOR_MISSING, 17),
    ("re-run after the update", insert(17, Compute(0, ())), Code.READ_AFTER_UPDATE, 17),
    ("no boundary", delete(5), Code.NO_LOSS_BOUNDARY, 5),
    ("no backward, no boundary", lambda good: good[:3], Code.NO_LOSS_BOUNDARY, 3),
    ("two boundaries", insert(9, LossBoundary()), Code.SECOND_LOSS_BOUNDARY, 9),
    ("boundary too late", move(5, 6), Code.BACKWARD_BEFORE_BOUNDARY, 5),
    ("boundary too early", move(5, 4), Code.RESULT_MISSING, 4),
    ("not kept", change(0, Compute(0, ())), Code.READ_ABSENT, 1),
    ("not run", delete(0), Code.READ_ABSENT, 0),
    ("freed before its reader", move(7, 6), Code.READ_ABSENT, 7),
    ("swapped in after its reader", move(8, 9), Code.READ_ON_HOST, 8),
    ("recomputed while live", insert(1, Compute(0, (A1,))), Code.COMPUTED_WHILE_LIVE, 1),
    ("kept by a needless re-run", change(13, Compute(0, (A1,))), Code.LEFT_ON_DEVICE, 18),
    ("recomputed while swapped in", insert(9, Compute(0, (A1,))), Code.COMPUTED_WHILE_LIVE, 9),
    ("over what it may not", change(0, Compute(0, (A1,), None, X)), Code.IN_PLACE, 0),
    ("freed twice", insert(11, Free(A1)), Code.FREED_ABSENT, 11),
    ("freed before it exists", insert(0, Free(D1)), Code.FREED_ABSENT, 0),
    ("frees the output", insert(5, Free(Y)), Code.RESULT_FREED, 5),
    ("frees a held tangent", insert(7, Free(DY)), Code.RESULT_FREED, 7),
    ("frees a gradient", insert(15, Free(G3)), Code.RESULT_FREED, 15),
    ("swaps out too early", insert(0, SwapOut(A1)), Code.SWAP_OUT_ABSENT, 0),
    ("swaps out after the free", move(2, 3), Code.SWAP_OUT_ABSENT, 3),
    ("swaps out twice", insert(3, SwapOut(A1)), Code.SWAP_OUT_TWICE, 3),
    ("never swapped out", delete(2), Code.SWAP_IN_ABSENT, 7),
    ("host copy dropped too early", move(12, 8), Code.SWAP_IN_ABSENT, 9),
    ("not freed before the swap in", delete(3), Code.SWAP_IN_WHILE_LIVE, 7),
    ("swapped in twice", insert(9, SwapIn(A1)), Code.SWAP_IN_WHILE_LIVE, 9),
    ("dropped twice", insert(13, DropHost(A1)), Code.DROP_HOST_ABSENT, 13),
    ("dropped before the swap out", insert(2, DropHost(A1)), Code.DROP_HOST_ABSENT, 2),
    ("gradient not kept", change(6, Compute(3, (D2,))), Code.RESULT_MISSING, 18),
    ("output not kept", change(4, Compute(2, ())), Code.RESULT_MISSING, 5),
    ("not freed", delete(15), Code.LEFT_ON_DEVICE, 17),
    ("host copy not dropped", delete(12), Code.LEFT_ON_HOST, 17),
]


def test_the_good_plan_is_good():
    assert validate(GRAPH, Program(GOOD)) is None
    assert replay(GRAPH, Program(GOOD)).peak_bytes == memory_use(GRAPH, Program(GOOD)).peak


@pytest.mark.parametrize(
    ("mutate", "code", "instruction"),
    [row[1:] for row in MUTATIONS],
    ids=[row[0] for row in MUTATIONS],
)
def test_mutation(mutate, code, instruction):
    violation = validate(GRAPH, Program(mutate(list(GOOD))))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.instruction) == (code, instruction)
    assert str(violation.instruction) in str(violation)


def drawing_graph() -> Graph:
    """Three layers with random operators beside them: two that nothing reads in the forward, one
    of them without a result, and one in the backward."""
    graph = three_layers()
    drop = Operator("drop", (X,), (13,), 1.0, random=True)
    noise = Operator("noise", (X,), (), 1.0, random=True)
    back = Operator("back", (DY,), (14,), 1.0, 0, Phase.BACKWARD, random=True)
    forward, backward = graph.operators[:3], graph.operators[3:]
    operators = (forward[0], drop, noise, *forward[1:], back, *backward)
    tensors = (*graph.tensors, Tensor("dropped", 5), Tensor("drawn", 5))
    return with_fields(graph, tensors=tensors, operators=operators)


DRAWING = drawing_graph()
DRAWN = store_all(DRAWING).instructions
DROP, NOISE, BACK, BOUNDARY = (
    DRAWN.index(x) for x in (Compute(1, ()), Compute(2, ()), Compute(5, ()), LossBoundary())
)

RANDOM_MUTATIONS = [
    ("another order", move(DROP, NOISE), Code.RANDOM_ORDER, NOISE),
    ("a re-run is the first", insert(0, Compute(2, ())), Code.RANDOM_ORDER, DROP + 1),
    ("after the loss", move(NOISE, BOUNDARY), Code.RANDOM_AFTER_LOSS, BOUNDARY),
    ("after the backward's", move(NOISE, BACK), Code.RANDOM_ORDER, BACK),
    ("left out", delete(DROP), Code.OPERATOR_MISSING, len(DRAWN) - 1),
    ("left out of the backward", delete(BACK), Code.OPERATOR_MISSING, len(DRAWN) - 1),
]


@pytest.mark.parametrize(
    ("mutate", "code", "instruction"),
    [row[1:] for row in RANDOM_MUTATIONS],
    ids=[row[0] for row in RANDOM_MUTATIONS],
)
def test_mutated_draws(mutate, code, instruction):
    violation = validate(DRAWING, Program(mutate(list(DRAWN))))
    assert (violation.code, violation.instruction) == (code, instruction)


@pytest.mark.parametrize("position", range(NOISE + 1, len(DRAWN) + 1))
def test_random_operators_may_run_again_anywhere(position):
    """Later runs replay the first one's draw."""
    good = insert(position, Compute(1, ()), Compute(2, ()))(list(DRAWN))
    assert validate(DRAWING, Program(good)) is None


def test_budgets_are_exact():
    use = memory_use(GRAPH, Program(GOOD))
    assert validate(GRAPH, Program(GOOD), Budget(use.peak, use.host_peak)) is None
    over = validate(GRAPH, Program(GOOD), Budget(use.peak - 1))
    assert (over.code, over.instruction) == (Code.OVER_BUDGET, use.during.index(use.peak))
    assert "1 too many" in over.message
    over = validate(GRAPH, Program(GOOD), Budget(use.peak, 299))
    assert (over.code, over.instruction) == (Code.OVER_HOST_BUDGET, 2)


PLACED = (
    (0, A1, 0),
    (1, A2, 300),
    (2, Y, 500),
    (4, D2, 600),
    (4, G3, 800),
    (6, D1, 1000),
    (6, G2, 1300),
    (9, G1, 0),
)
PLACED_PEAK_BYTES = 1600 + 964 + 100 + 60

PLACEMENTS = [
    ("of a tangent", [*PLACED, (3, DY, 2000)], Code.OFFSET_STRAY, 3),
    ("of another operator's", [*PLACED, (0, A2, 2000)], Code.OFFSET_STRAY, 0),
    ("at a free", [*PLACED, (5, A2, 2000)], Code.OFFSET_STRAY, 5),
    ("beyond the end", [*PLACED, (11, A2, 2000)], Code.OFFSET_STRAY, 11),
    ("twice", [*PLACED, (1, A2, 2000)], Code.OFFSET_REPEATED, 1),
    ("negative", [(0, A1, -1), *PLACED[1:]], Code.OFFSET_NEGATIVE, 0),
    ("none", PLACED[1:], Code.OFFSET_MISSING, 0),
    ("overlap at the end", [*PLACED[:3], (4, D2, 599), *PLACED[4:]], Code.ADDRESSES_OVERLAP, 4),
    ("overlap at the start", [(0, A1, 1), *PLACED[1:]], Code.ADDRESSES_OVERLAP, 1),
    (
        "overlap in one operator",
        [*PLACED[:4], (4, G3, 799), *PLACED[5:]],
        Code.ADDRESSES_OVERLAP,
        4,
    ),
    ("overlap with a result", [*PLACED[:7], (9, G1, 101)], Code.ADDRESSES_OVERLAP, 9),
]


def placed(offsets):
    return Program(store_all(three_layers()).instructions, offsets)


@pytest.mark.parametrize(
    ("offsets", "code", "instruction"),
    [row[1:] for row in PLACEMENTS],
    ids=[row[0] for row in PLACEMENTS],
)
def test_mutated_placement(offsets, code, instruction):
    violation = validate(three_layers(), placed(offsets))
    assert (violation.code, violation.instruction) == (code, instruction)


def test_placement_and_its_budget():
    graph = three_layers()
    assert validate(graph, placed(PLACED), Budget(PLACED_PEAK_BYTES)) is None
    assert replay(graph, placed(PLACED)).placed_peak_bytes == PLACED_PEAK_BYTES
    over = validate(graph, placed(PLACED), Budget(PLACED_PEAK_BYTES - 1))
    assert over.code is Code.ARENA_OVER_BUDGET


def test_results_may_lie_outside_the_arena():
    graph = three_layers()
    inside = [row for row in PLACED if row[1] not in graph.kept]
    assert validate(graph, placed(inside)) is None
    outside = max(964 + 100 + 100 + 200 + 300 + 60, 964 + 100 + 100 + 900)
    assert replay(graph, placed(inside)).placed_peak_bytes == 1300 + outside


def test_transient_outputs_may_have_an_address_and_must_not_overlap():
    offsets = [(0, A1, 0), (1, A2, 300), (6, D2, 600), (8, A1, 0), (9, D1, 1000), (14, G1, 500)]
    assert validate(GRAPH, Program(GOOD, offsets)) is None
    assert validate(GRAPH, Program(GOOD, [*offsets, (13, A1, 0)])) is None
    # Over at the next instruction, which may use its address.
    assert validate(GRAPH, Program(GOOD, [*offsets[:-1], (13, A1, 500), (14, G1, 500)])) is None
    violation = validate(GRAPH, Program(GOOD, [*offsets, (13, A1, 701)]))
    assert (violation.code, violation.instruction) == (Code.ADDRESSES_OVERLAP, 13)


@pytest.mark.parametrize(
    "name",
    [
        "memopt.programs.validate",
        "memopt.programs.validate_network",
        "memopt.programs.validate_placement",
        "tests.models.validate_chain",
    ],
)
def test_the_validators_share_no_code_with_what_they_check(name):
    module = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(module))
    imported = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    own = {x.removeprefix("memopt.") for x in imported if x.startswith("memopt")}
    data = {f"models.{x}" for x in ("budget", "graph", "chain", "steps")}
    data |= {f"programs.{x}" for x in ("instructions", "violations", "validate_placement")}
    data |= {"programs.validate_moved", "programs.validate_network"}
    assert own <= data


def test_every_code_has_a_mutation():
    from tests.models.test_moved import HOST_MUTATIONS, REPEATED_MUTATIONS
    from tests.models.test_moved import MUTATIONS as MOVED_MUTATIONS
    from tests.models.test_validate_chain import MUTATIONS as CHAIN_MUTATIONS

    named = {row[2] for row in (*MUTATIONS, *RANDOM_MUTATIONS, *PLACEMENTS, *CHAIN_MUTATIONS)}
    named |= {row[1] for row in (*MOVED_MUTATIONS, *HOST_MUTATIONS, *REPEATED_MUTATIONS)}
    elsewhere = {Code.OVER_BUDGET, Code.OVER_HOST_BUDGET, Code.ARENA_OVER_BUDGET}
    elsewhere |= {Code.COLLECTIVE_ORDER}
    assert named | elsewhere == set(Code)


WRITTEN_BACK = writing_back(random_graph(Random(5), 3))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_back_takes_memory_until_the_boundary(seed: int) -> None:
    graph = writing_back(random_graph(Random(seed), 4))
    program, use = store_all(graph), memory_use(graph, store_all(graph))
    assert validate(graph, program) is None
    assert replay(graph, program).step_bytes == tuple(use.during)
    kept = with_fields(graph, written_back=())
    more = memory_use(kept, store_all(kept)).during
    size = sum(graph.tensors[t].size_bytes for t in graph.written_back)
    at = program.boundary
    assert at is not None
    assert use.during[:at] == more[:at]
    assert use.during[at:] == [one - size for one in more[at:]]
    assert memory_lower_bound(graph) <= use.peak


@pytest.mark.parametrize("after", [False, True])
def test_what_is_written_back_is_freed_by_the_boundary_alone(after: bool) -> None:
    listed = list(store_all(WRITTEN_BACK))
    at, tensor = listed.index(LossBoundary()), WRITTEN_BACK.written_back[0]
    wrong = Program([*listed[: at + after], Free(tensor), *listed[at + after :]])
    found = validate(WRITTEN_BACK, wrong)
    assert found is not None
    assert found.code is (Code.FREED_ABSENT if after else Code.RESULT_FREED)


def test_what_is_written_back_is_live_at_the_boundary() -> None:
    first = WRITTEN_BACK.written_back[-1]
    listed = [
        with_fields(x, outputs=tuple(t for t in x.outputs if t != first))
        if isinstance(x, Compute)
        else x
        for x in store_all(WRITTEN_BACK)
    ]
    found = validate(WRITTEN_BACK, Program(listed))
    assert found is not None
    assert (found.code, found.instruction) == (Code.RESULT_MISSING, listed.index(LossBoundary()))
    with pytest.raises(InvalidProgramError, match="is not on the device"):
        replay(WRITTEN_BACK, Program(listed))
