"""Plan files written to do harm, their figures, fingerprint and checksum right: all refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memopt
from memopt.errors import PlanFileError
from memopt.files.envelope import pack, unpack
from memopt.files.plan_file import encode
from tests.plan.edited import MADE, build, decode, inputs, plan, refigured


def rotor_value() -> Any:
    return json.loads(json.dumps(encode(MADE["rotor"]())))


def refused(value: Any, why: str) -> None:
    with pytest.raises(PlanFileError, match=why) as caught:
        decode(unpack(pack(value))).apply(build())
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_not_the_fingerprints_is_refused() -> None:
    value = rotor_value()
    sizes = value["graph"]["tensors"][0]
    sizes["size_bytes"] += 64
    refused(value, "not the one that its fingerprint is of")


def test_a_file_cannot_make_a_parameter_its_own() -> None:
    """A parameter that the file calls an activation, for a kernel to write over."""
    value = json.loads(json.dumps(encode(plan("store-all"))))
    graph, program = value["graph"], value["program"]
    scale = [tensor["name"] for tensor in graph["tensors"]].index("scale")
    graph["tensors"][scale]["kind"] = "activation"
    graph["operators"][0]["writes"].append(scale)
    victim = next(
        i
        for i, one in enumerate(graph["operators"])
        if one["phase"] == "backward" and scale in one["reads"]
    )
    graph["operators"][victim]["in_place"] = [scale]
    for row in program["instructions"]:
        if row[0] == "compute" and row[1] == 0:
            row[2].append(scale)
        if row[0] == "compute" and row[1] == victim:
            row.append(scale)
    harmful = refigured(value)
    assert harmful is not None
    refused(harmful, r"captured graphs differ.*'scale'")


def test_a_file_cannot_overlap_addresses_by_shrinking_tensors() -> None:
    value = json.loads(json.dumps(encode(MADE["placed"]())))
    for tensor in value["graph"]["tensors"]:
        if tensor["kind"] in ("activation", "gradient"):
            tensor["size_bytes"] = min(64, tensor["size_bytes"])
    rows = value["program"]["offsets"]
    # What shares an offset goes on doing so: it is computed in place, or lives at another time.
    closer = {offset: 64 * n for n, offset in enumerate(sorted({row[2] for row in rows}))}
    value["program"]["offsets"] = [[i, t, closer[offset]] for i, t, offset in rows]
    harmful = refigured(value)
    assert harmful is not None
    refused(harmful, "captured graphs differ")


def test_an_in_place_mark_is_not_believed() -> None:
    """Marks are in no fingerprint: the model's own graph has the say."""
    value = json.loads(json.dumps(encode(plan("store-all"))))
    graph, program = value["graph"], value["program"]
    computed = {t for one in graph["operators"] for t in one["writes"]}
    results = {*graph["outputs"], *graph["gradients"]}
    sizes = [tensor["size_bytes"] for tensor in graph["tensors"]]
    found = None
    for index, one in enumerate(graph["operators"]):
        for tensor in one["reads"]:
            free = tensor in computed - results and tensor not in one.get("in_place", ())
            if free and one["writes"] and sizes[tensor] == sizes[one["writes"][0]]:
                found = index, tensor
    assert found is not None
    index, tensor = found
    graph["operators"][index]["in_place"] = [tensor]
    for row in program["instructions"]:
        if row[0] == "compute" and row[1] == index:
            row[4:] = [tensor]
    program["instructions"] = [r for r in program["instructions"] if r != ["free", tensor]]
    harmful = refigured(value)
    assert harmful is not None
    refused(harmful, "overwrites")


def test_workspaces_of_a_file_count_only_where_they_are_more() -> None:
    """A file that says kernels need no scratch memory, to keep a budget that is too small."""
    model, image = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten()), torch.randn(8, 4, 16, 16)
    made = memopt.plan(model, image, budget="min", strategy="store-all", progress=False)
    assert made.graph is not None
    needed = [one.workspace_bytes for one in made.graph.operators]
    value = json.loads(json.dumps(encode(made)))
    for one in value["graph"]["operators"]:
        one["workspace_bytes"] = 0
    harmful = refigured(value)
    assert harmful is not None
    found = decode(unpack(pack(harmful)))
    assert found.budget is not None
    assert made.budget is not None
    if found.budget < made.budget:
        with pytest.raises(PlanFileError, match="does not hold for this model"):
            found.apply(model)
    else:
        assert max(needed) == 0


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_of_nothing_is_refused(budget: int) -> None:
    value = rotor_value()
    value["budget_bytes"] = budget
    refused(value, "a budget of at least 1 byte")


def test_a_host_budget_is_kept() -> None:
    made = memopt.plan(
        build(),
        inputs(),
        strategy="offload-graph",
        budget="min",
        host_budget=2**20,
        progress=False,
    )
    assert made.host_peak_bytes > 0
    value = json.loads(json.dumps(encode(made)))
    value["host_budget_bytes"] = made.host_peak_bytes - 1
    refused(value, "no valid plan")


@pytest.mark.parametrize("autocast", [["nonsense", None], ["bfloat16"], [None, None, None], [1, 2]])
def test_autocast_that_does_not_exist_is_refused(autocast: list[Any]) -> None:
    value = rotor_value()
    value["record"]["autocast"] = autocast
    refused(value, "autocast")


def test_a_call_larger_than_any_is_refused() -> None:
    value = rotor_value()
    value["record"]["args"]["tuple"][0]["tensor"][1] = [2**40, 2**40]
    refused(value, "larger than any input")


def test_a_status_and_a_bound_that_no_plan_has_are_refused() -> None:
    value = rotor_value()
    refused({**value, "status": "infeasible"}, "the status of a plan")
    refused({**value, "lower_bound_s": value["figures"]["step_time_s"] * 2}, "a lower bound")
    refused({**value, "lower_bound_s": -1.0}, "at least 0")


def test_whole_steps_are_checked_like_modules() -> None:
    def whole(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    model, target = build(), torch.zeros(32, 8)
    made = memopt.plan(
        model,
        inputs(),
        strategy="rotor",
        budget="min",
        loss_fn=functional.mse_loss,
        targets=(target,),
        optimizer=whole(model),
        whole_step=True,
        progress=False,
    )
    value = json.loads(json.dumps(encode(made)))
    fresh = build()
    decode(unpack(pack(value))).train_step(fresh, functional.mse_loss, whole(fresh))
    kinds = [tensor["kind"] for tensor in value["graph"]["tensors"]]
    value["graph"]["tensors"][kinds.index("buffer")]["kind"] = "input"
    harmful = refigured(value)
    assert harmful is not None
    with pytest.raises(PlanFileError, match=r"steps differ.*num_batches_tracked") as caught:
        decode(unpack(pack(harmful))).train_step(fresh, functional.mse_loss, whole(fresh))
    assert "\n" not in str(caught.value)


def test_a_plan_in_memory_is_checked_against_another_model() -> None:
    made = MADE["rotor"]()
    made.apply(build())
    assert made.graph is not None
    assert made.profiled is not None
    tensors = [replace(one, size_bytes=max(0, one.size_bytes - 1)) for one in made.graph.tensors]
    shrunk = replace(made, graph=replace(made.graph, tensors=tuple(tensors)))
    with pytest.raises(PlanFileError, match="bytes in the plan and"):
        shrunk.apply(build())
