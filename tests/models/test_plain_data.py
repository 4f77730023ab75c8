"""What is compared and read as plain data, without a model: graphs of plans, of ranks and of files,
calls, budgets. Each difference is named."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from memopt.errors import InfeasibleBudgetError, PlanFileError
from memopt.models.agreed_graph import agreed_graph
from memopt.models.arguments import Arguments, Nest, Opaque, Plain, TensorSpec
from memopt.models.budget import check_budget, format_bytes, parse_budget, split_reserved
from memopt.models.codec import codec
from memopt.models.graph import Graph, Implementation, Operator, Tensor, TensorKind
from memopt.models.optimizer_names import optimizer_name
from memopt.models.reader import Reader
from memopt.models.record import ModelRecord, difference
from memopt.models.same_graph import as_captured, graph_difference, resized, with_figures
from memopt.models.step_rules import StepRules
from memopt.models.variants import undominated

QUICK = Implementation("quick", 0.5, 4)


def priced() -> Graph:
    """x → a → b, of which the second operator has an implementation."""
    tensors = [Tensor("x", 8, TensorKind.INPUT), Tensor("a", 8), Tensor("b", 8)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2,), 1.0, 2, implementations=(QUICK,)),
    ]
    return Graph(tensors, operators, outputs=(2,))


def with_second(**changes: Any) -> Graph:
    graph = priced()
    return replace(graph, operators=(graph.operators[0], replace(graph.operators[1], **changes)))


def with_result(**changes: Any) -> Graph:
    graph = priced()
    return replace(graph, tensors=(*graph.tensors[:2], replace(graph.tensors[2], **changes)))


@pytest.mark.parametrize(
    ("planned", "found", "message"),
    [
        (priced(), priced(), None),
        (with_result(name="c"), priced(), "'c' where the model has the activation 'b'"),
        (priced(), with_result(size_bytes=9), "'b' has 8 bytes in the plan and 9 in the model"),
        (with_result(size_bytes=9), priced(), None),
        (with_second(random=True), priced(), "the plan's random is True, the model's False"),
        (with_second(in_place=(1,)), priced(), "the plan overwrites (1,), the model ()"),
        (priced(), with_second(implementations=()), "the model has no implementation 'quick'"),
        (
            priced(),
            with_second(implementations=(replace(QUICK, exact=False),)),
            "its implementation 'quick' is another in the model",
        ),
        (priced(), replace(priced(), outputs=(1,)), "outputs are (2,), the model's (1,)"),
        (priced(), replace(priced(), extra_resident_bytes=3), "graph are 0, of the model 3"),
        (
            replace(priced(), tensors=(*priced().tensors, Tensor("d", 1))),
            priced(),
            "the plan has 4 tensors and the model 3",
        ),
        (
            replace(priced(), operators=(*priced().operators, Operator("h", (2,), (), 1.0))),
            priced(),
            "the plan has 3 operators and the model 2",
        ),
    ],
)
def test_the_first_difference_of_graphs(planned: Graph, found: Graph, message: str | None) -> None:
    difference_ = graph_difference(planned, found)
    assert message in difference_ if message and difference_ else difference_ == message


def test_figures_of_a_plan_in_the_models_graph() -> None:
    graph = with_second(in_place=(1,))
    slow = replace(graph, operators=tuple(replace(o, time_s=9.0) for o in graph.operators))
    assert with_figures(graph, slow).operators[1].in_place == (1,)
    found = with_figures(graph, slow, {1: 12}, {(1, "quick"): 6, (1, None): 7})
    assert [o.time_s for o in found.operators] == [9.0, 9.0]
    assert (found.tensors[1].size_bytes, found.tensors[2].size_bytes) == (12, 8)
    second = found.operators[1]
    assert (second.workspace_bytes, second.implementations[0].workspace_bytes) == (7, 6)
    assert second.in_place == ()
    assert resized(priced(), found) == ((1, 8),)
    captured = as_captured(found, ((1, 8),))
    assert captured.tensors == priced().tensors
    assert [(o.implementations, o.in_place) for o in captured.operators] == [((), ())] * 2
    with pytest.raises(ValueError, match="no tensor 3"):
        as_captured(found, ((3, 8),))


def test_ranks_agree_on_the_largest_figures() -> None:
    larger = with_second(time_s=2.0, workspace_bytes=5, implementations=(replace(QUICK, time_s=3),))
    found = agreed_graph([with_result(size_bytes=6), larger, priced()])
    assert found.tensors == priced().tensors
    second = found.operators[1]
    assert (second.time_s, second.workspace_bytes) == (2.0, 5)
    assert second.implementations == (replace(QUICK, time_s=3),)
    both = [with_second(in_place=(1,), implementations=()) for _ in range(2)]
    assert agreed_graph(both).operators[1].in_place == (1,)
    assert agreed_graph([both[0], with_second(implementations=())]).operators[1].in_place == ()
    more = Operator("more", (2,), (), 1.0)
    for other in (with_second(name="h"), replace(priced(), operators=(*priced().operators, more))):
        with pytest.raises(ValueError, match="rank 1 runs another step than rank 0: "):
            agreed_graph([priced(), other])


def call(**changes: Any) -> ModelRecord:
    spec = TensorSpec((2, 3), (3, 1), "float32", "cpu", False)
    inputs = Nest("tuple", (spec, Plain(math.nan), Nest("list", (Plain(1),))))
    options = Nest("dict", (Plain(True),), ("flag",))
    record = ModelRecord(
        "Net",
        "cpu",
        inputs,
        options,
        (("", True),),
        (("w", spec),),
        ((False, ""), (False, "")),
        "2",
    )
    return replace(record, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"device": "cuda"}, "made for the device 'cpu', the model is on 'cuda'"),
        ({"ranks": 2}, "over 1 rank(s), this one is over 2"),
        ({"args": Nest("tuple", ())}, "argument: planned a tuple of 3, got a tuple of 0"),
        (
            {"kwargs": Nest("dict", (Plain(True),), ("other",))},
            "argument: planned the names flag, got the names other",
        ),
        (
            {"kwargs": Nest("dict", (Plain(1),), ("flag",))},
            "argument 'flag': planned True, got 1",
        ),
        ({"repeated": ((1, 0),)}, "arguments 0 and 1 were planned as two tensors and are one"),
        ({"training": (("", False),)}, "the model was planned in train mode and is in eval mode"),
        ({"tensors": ()}, "the planned Net has a parameter or buffer 'w', this has none"),
        ({"autocast": ((True, "bfloat16"), (False, ""))}, "autocast was"),
    ],
)
def test_the_first_difference_of_calls(changes: dict[str, Any], message: str | None) -> None:
    found = difference(call(), call(**changes))
    assert message in found if message and found else found == message


def test_differences_seen_from_the_other_side() -> None:
    spec = TensorSpec((2, 3), (3, 1), "float32", "cpu", True)
    assert "as one tensor and are two" in str(difference(call(repeated=((1, 0),)), call()))
    assert "this model has a parameter or buffer 'w'" in str(difference(call(tensors=()), call()))
    changed = str(difference(call(), call(tensors=(("w", spec),))))
    assert changed.endswith("on cpu and is float32[2, 3] with strides (3, 1) on cpu, requires_grad")
    inner = (("layer", True),)
    assert "module 'layer' was planned in eval mode" in str(
        difference(call(training=(("layer", False),)), call(training=inner))
    )


def test_arguments_in_files() -> None:
    data = codec(Arguments).encode(call().args)
    assert str(codec(Arguments).read(Reader(data, "args"))) == str(call().args)
    batch = Nest("tuple", (Nest("users.Batch", (Plain(1),), ("x",)),))
    assert codec(Arguments).read(Reader(codec(Arguments).encode(batch), "args")) == batch
    with pytest.raises(PlanFileError, match=r"inputs\[0\] is a Socket: a plan file holds tensors"):
        codec(Arguments).encode(Nest("tuple", (Opaque("Socket"),)))
    same = ["a", {"value": 1}]
    deep: dict[str, Any] = {"tuple": []}
    for _ in range(40):
        deep = {"tuple": [deep]}
    for wrong, message in (
        ({"list": []}, "a tuple"),
        ({"tuple": [{"value": [1]}]}, "null, true, false, a whole number or a string"),
        ({"tuple": [{"other": 1}]}, "an argument"),
        ({"tuple": [{"float": "1,5"}]}, "a number in a string"),
        ({"tuple": [{"float": "1.50"}]}, "a number as Python writes it"),
        ({"tuple": [{"dict": [same, same]}]}, "keys that differ"),
        ({"tuple": [{"dict": [["a"]]}]}, "[name, value]"),
        ({"tuple": [{"object": ["users.Batch"]}]}, "a class and its attributes"),
        (deep, "at most 32 levels deep"),
    ):
        with pytest.raises(PlanFileError) as error:
            codec(Arguments).read(Reader(wrong, "args"))
        assert message in str(error.value)


def test_budgets() -> None:
    for budget, expected in (
        (None, None),
        ("0.5", 500),
        (0.25, 250),
        ("2KiB", 2048),
        (7, 7),
    ):
        assert parse_budget(budget, 1000) == expected
    for wrong in ("much", "2 parsecs", True, [1], 0, 1.5, -0.5):
        with pytest.raises(ValueError, match="budget"):
            parse_budget(wrong, 1000)
    check_budget("min")
    with pytest.raises(ValueError, match="cannot read the budget 'min'"):
        check_budget("min reserved")
    assert split_reserved("6GiB reserved") == ("6GiB", True)
    assert split_reserved("600 reserved") == (600, True)
    assert split_reserved("6GiB") == ("6GiB", False)
    assert [format_bytes(size) for size in (1023, 2048, 5 * 2**40)] == [
        "1023 B",
        "2.0 KiB",
        "5.00 TiB",
    ]
    error = InfeasibleBudgetError("no", 5, 9)
    assert error.__reduce__() == (InfeasibleBudgetError, ("no", 5, 9, True))


def test_names_and_rules() -> None:
    assert optimizer_name(" AdamW ") == "adamw"
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        optimizer_name("lion")
    for wrong in ({"micro_batches": 0}, {"clip_norm": -1.0}, {"norm_type": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StepRules(**wrong)


def test_implementations_that_are_worse_in_everything_are_left_out() -> None:
    slower, leaner = replace(QUICK, name="slower", time_s=0.75), Implementation("leaner", 2.0, 1)
    alike, rough = replace(QUICK, name="alike"), Implementation("rough", 0.25, 4, exact=False)
    choices = (QUICK, slower, leaner, alike, rough, replace(rough, name="worse", time_s=3.0))
    operator = replace(priced().operators[1], implementations=choices)
    assert [one.name for one in undominated(operator)] == ["quick", "leaner", "rough"]
