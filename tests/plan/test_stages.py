"""The stages that prepare a step: which run, what the plan records of them, and that applying the
plan runs the same ones again."""

from __future__ import annotations

import copy
import inspect
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.api.plan import Plan
from memopt.api.request import PlanRequest
from memopt.errors import PlanFileError
from memopt.files.plan_file import from_bytes, to_bytes
from memopt.kernels import with_implementations
from memopt.models.options import Pricing, StepOptions
from memopt.models.stage_record import STAGE_NAMES, StageRecord, options_of, with_record
from memopt.profiler.session import profile_model
from memopt.stages import STAGES, PlanStage, Preparation, prepared
from memopt.strategies import resolve
from tests.kernels.test_in_plans import QUICK, cnn, three_steps
from tests.kernels.test_plans_apply import Masks
from tests.programs.test_validate import training_graph

ONLY_AGAIN = ("recognise", "figures")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def names(plan: Plan) -> list[str]:
    return [one.name for one in plan.stages]


def test_recorded_names_are_those_of_the_stages() -> None:
    assert tuple(s.name for s in STAGES if s.name not in ONLY_AGAIN) == STAGE_NAMES


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.name)
def test_a_stage_that_nobody_asked_for_says_why_not(stage: PlanStage) -> None:
    step = Preparation(
        None,
        None,
        resolve("rotor"),
        memopt.Device(),
        StepOptions(),
        Pricing(),
        False,
        lambda _fraction, _what: None,
    )
    assert stage.why_not(step)
    assert prepared([stage], step) is step


def test_a_stage_is_recorded_once_as_it_ran_last() -> None:
    records = with_record((StageRecord("capture"), StageRecord("placeable")), "capture", "again")
    assert records == (StageRecord("placeable"), StageRecord("capture", ("again",)))
    assert options_of(records, "capture") == ("again",)
    assert options_of(records, "agree") is None


def test_a_plan_says_which_stages_and_passes_made_it() -> None:
    model, x = network(), torch.randn(4, 8)
    plain = memopt.plan(model, x, strategy="store-all", progress=False)
    assert plain.stages == (StageRecord("capture", ("measured", "aten")),)
    plan = memopt.plan(
        model, x, strategy="store-all", accumulate=True, order=True, place=True, progress=False
    )
    assert names(plan) == ["capture", "accumulate", "placeable", "order", "place"]
    assert plan.ran("accumulate")
    assert not plan.ran("movable")
    assert from_bytes(to_bytes(plan)).stages == plan.stages
    again = memopt.plan(plan.profiled, strategy="store-all", progress=False)
    assert names(again) == ["capture", "accumulate", "placeable"]


def test_a_whole_step_says_what_may_move() -> None:
    model, x = network(), torch.randn(4, 8)
    plan = memopt.plan(
        model,
        x,
        strategy="offload-graph",
        loss_fn=torch.sum,
        optimizer=torch.optim.SGD(model.parameters(), momentum=0.9),
        movable=("parameters", "optimizer"),
        steady_state=True,
        device=memopt.Device(to_host_bytes_per_s=1e9),
        progress=False,
    )
    assert names(plan) == ["capture", "movable", "host updates"]
    assert plan.stages[1].options == ("optimizer", "parameters", "steady state")


def test_options_have_the_names_of_the_arguments() -> None:
    arguments = inspect.signature(memopt.plan).parameters.keys()
    assert PlanRequest().options.keys() - arguments == {"charges", "rules"}
    rules = {"micro_batches", "clip_norm", "norm_type", "scaler", "reduce_once"}
    others = {"model", "inputs", "progress", "mesh"}
    assert arguments - PlanRequest().options.keys() == rules | others


def test_a_cost_model_has_passes_alone() -> None:
    plan = memopt.plan(training_graph(), strategy="store-all", order=True, progress=False)
    assert plan.stages == (StageRecord("order"),)


@pytest.mark.parametrize("exact_only", [True, False])
def test_alternatives_are_attached_again_as_recorded(exact_only: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = cnn()
    other = copy.deepcopy(model)
    profiled = profile_model(model, x, options=QUICK)
    profiled = with_implementations(profiled, exact_only=exact_only, options=QUICK)
    plan = memopt.plan(profiled, strategy=Masks(), progress=False)
    assert options_of(plan.stages, "alternatives") == ("exact" if exact_only else "other rounding",)
    plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    assert loaded.stages == plan.stages
    three_steps(loaded.apply(other, x), x)
    # A plan that does not say from which it chooses is not guessed at.
    silent = replace(loaded, stages=())
    with pytest.raises(PlanFileError, match="does not say from which"):
        silent.apply(other, x)


def test_applying_a_plan_leaves_its_record_alone(tmp_path: Path) -> None:
    model, x = network(), torch.randn(4, 8)
    memopt.plan(model, x, strategy="store-all", progress=False).save(tmp_path / "plan.json")
    plan = memopt.load(tmp_path / "plan.json")
    before = set(vars(plan))
    plan.apply(network(), x)
    assert set(vars(plan)) == before == {one.name for one in fields(Plan)}
    with pytest.raises(FrozenInstanceError):
        plan.stages = ()  # type: ignore[misc]  # the misuse under test
