"""A loaded plan applies to the planned model only, and says what differs otherwise."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.api.plan import Plan
from memopt.errors import MemoptError, PlanFileError
from memopt.files.envelope import pack, unpack
from memopt.files.plan_file import encode
from memopt.models.arguments import Nest, Plain
from tests.plan.edited import decode
from tests.plan.tiny import Block, make, profiled, step_digest, tight_plan

WRONG = (None, True, -1, 2**40, 0.5, "", "float31", "meta", [], {}, [[]], {"tuple": 3})


@pytest.fixture(scope="module")
def planned() -> dict[str, Plan]:
    """Plans made in this process; their models are kept by nobody."""
    return {name: tight_plan(profiled(make(name))) for name in ("mlp", "nested")}


@pytest.fixture(scope="module")
def loaded(planned: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """The same plans from files."""
    folder = tmp_path_factory.mktemp("plans")
    for name, plan in planned.items():
        plan.save(folder / name)
    return {name: memopt.load(folder / name) for name in planned}


def refusal(plan: Plan, model: nn.Module, inputs: Any = None) -> str:
    with pytest.raises(PlanFileError) as caught:
        plan.apply(model, inputs)
    message = str(caught.value)
    call = f"budget={plan.budget}, strategy={plan.strategy.name!r})"
    assert f"memopt.plan(model, inputs, {call}" in message
    return message


def wider() -> nn.Module:
    return nn.Sequential(*[Block(33) for _ in range(6)])


def in_eval() -> nn.Module:
    return make("mlp")[0].eval()


def partly_in_eval() -> nn.Module:
    model = make("mlp")[0]
    model[2].dropout.eval()
    return model


def frozen() -> nn.Module:
    model = make("mlp")[0]
    model[0].linear.weight.requires_grad_(False)
    return model


def without_dropout() -> nn.Module:
    model = make("mlp")[0]
    model[3].dropout = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (in_eval, ["the model was planned in train mode and is in eval mode"]),
        (partly_in_eval, ["'2.dropout'", "train mode", "eval mode"]),
        (wider, ["'0.linear.weight'", "float32[32, 32]", "float32[33, 33]"]),
        (lambda: make("mlp")[0].double(), ["'0.linear.weight'", "float32", "float64"]),
        (frozen, ["'0.linear.weight'", "requires_grad"]),
        (lambda: nn.Sequential(*[Block(32) for _ in range(5)]), ["'5.linear.weight'", "none"]),
        (
            lambda: nn.Sequential(*[Block(32) for _ in range(7)]),
            ["this model", "'6.linear.weight'"],
        ),
        (without_dropout, ["captured graphs differ"]),
    ],
)
@pytest.mark.parametrize("source", ["planned", "loaded"])
def test_another_model_is_refused(
    build: Callable[[], nn.Module],
    parts: list[str],
    source: str,
    request: pytest.FixtureRequest,
) -> None:
    message = refusal(request.getfixturevalue(source)["mlp"], build())
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        (torch.zeros(65, 32), ["argument 0", "float32[64, 32]", "float32[65, 32]"]),
        (torch.zeros(64, 32).double(), ["float32[64, 32]", "float64[64, 32]"]),
        (torch.zeros(32, 64).t(), ["strides (32, 1)", "strides (1, 64)"]),
        (torch.zeros(64, 32, requires_grad=True), ["requires_grad"]),
        ({"input": torch.zeros(64, 32)}, ["planned a tuple of 1", "got a tuple of 0"]),
        ((torch.zeros(64, 32), None), ["planned a tuple of 1", "got a tuple of 2"]),
    ],
)
def test_other_inputs_are_refused(inputs: Any, parts: list[str], loaded: dict[str, Plan]) -> None:
    message = refusal(loaded["mlp"], make("mlp")[0], inputs)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"mask": torch.ones(8, 16)}, "argument 'mask': planned None, got float32[8, 16]"),
        ({"options": {"gain": 1, "name": "scaled"}}, "argument 'options' 'gain': planned 0.5"),
        ({"options": {"gain": 0.5, "name": "plain"}}, "planned 'scaled', got 'plain'"),
        ({"options": {"gain": 0.5}}, "planned the names gain, name, got the names gain"),
        ({"pair": (torch.zeros(8, 16), (2.0, 2))}, "planned a list of 2, got a tuple of 2"),
        ({"pair": (torch.zeros(8, 16), [2.0, True])}, "planned 2, got True"),
    ],
)
def test_other_arguments_are_refused(
    change: dict[str, Any], part: str, loaded: dict[str, Plan]
) -> None:
    model, inputs, _ = make("nested")
    assert part in refusal(loaded["nested"], model, {**inputs, **change})


@pytest.mark.parametrize("order", [list, reversed])
def test_given_inputs_do(loaded: dict[str, Plan], order: Callable[[Any], Any]) -> None:
    model, inputs, _ = make("nested")
    again = make("nested")[0]
    inputs = dict(order(list(inputs.items())))
    assert step_digest("nested", loaded["nested"].apply(model, inputs)) == step_digest(
        "nested", again
    )


def test_one_tensor_given_twice(tmp_path: Path) -> None:
    class Autoencoder(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (super().forward(x) - y).square().sum()

    model, x = Autoencoder(4, 4), torch.randn(3, 4)
    memopt.plan(model, {"x": x, "y": x}, cache=False, progress=False).save(tmp_path / "plan")
    plan = memopt.load(tmp_path / "plan")
    assert torch.equal(plan.apply(model)(x=x, y=x), model(x, x))
    assert "arguments 0 and 1 were planned as one tensor and are two" in refusal(
        plan, model, {"x": x, "y": x.clone()}
    )


def test_under_autocast_it_is_refused(loaded: dict[str, Plan]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in refusal(loaded["mlp"], make("mlp")[0])


def test_another_torch_is_named(loaded: dict[str, Plan]) -> None:
    plan = loaded["mlp"]
    assert plan.record is not None
    record = dataclasses.replace(plan.record, torch_version="1.0", fingerprint="0" * 64)
    message = refusal(dataclasses.replace(plan, record=record), make("mlp")[0])
    assert "planned with torch 1.0" in message
    # Of the same graph, it runs and says so.
    record = dataclasses.replace(plan.record, torch_version="1.0")
    with pytest.warns(UserWarning, match=r"planned with torch 1\.0.*Plan again: memopt\.plan"):
        dataclasses.replace(plan, record=record).apply(make("mlp")[0])


def test_a_plan_of_a_cost_model_cannot_run(planned: dict[str, Plan], tmp_path: Path) -> None:
    assert planned["mlp"].graph is not None
    plan = memopt.plan(planned["mlp"].graph, strategy="store-all")
    plan.save(tmp_path / "plan.json")
    for one in (plan, memopt.load(tmp_path / "plan.json")):
        with pytest.raises(ValueError, match="cost model"):
            one.apply(make("mlp")[0])


def test_an_input_that_a_file_cannot_hold(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("mlp")[0]

        def forward(self, x: dict[int, torch.Tensor]) -> torch.Tensor:
            return self.inner(x[0])

    model = Wrapper()
    _, x, loss = make("mlp")
    plan = tight_plan(profiled((model, ({0: x},), loss)))
    with pytest.raises(PlanFileError, match=r"inputs\[0\] is a dict with keys"):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_hostile_records(loaded: dict[str, Plan]) -> None:
    """Any value at any place of the record: refused in words, or consistent with the model."""
    value = encode(loaded["nested"])
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        path, holder, old = _random_place(value["record"], rng)
        holder[path[-1]] = rng.choice(WRONG)
        try:
            decode(unpack(pack(value))).apply(make("nested")[0])
        except (MemoptError, ValueError):
            refused += 1
        finally:
            holder[path[-1]] = old
    assert refused > 40


def _random_place(record: Any, rng: random.Random) -> tuple[list[Any], Any, Any]:
    """(path, the container at its end, what stands there)."""
    path: list[Any] = []
    holder = inside = record
    while isinstance(inside, dict | list) and inside and (not path or rng.random() < 0.8):
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        path.append(rng.choice(keys))
        holder, inside = inside, inside[path[-1]]
    return path, holder, inside


def test_floats_that_json_lacks(loaded: dict[str, Plan], tmp_path: Path) -> None:
    plan = loaded["mlp"]
    assert plan.record is not None
    odd = tuple(Plain(x) for x in (float("inf"), float("-inf"), float("nan"), -0.0, 1e-320, 2**70))
    record = dataclasses.replace(plan.record, args=Nest("tuple", odd[:-1]))
    dataclasses.replace(plan, record=record).save(tmp_path / "plan.json")
    read = memopt.load(tmp_path / "plan.json").record
    assert read is not None
    assert repr(read.args) == repr(record.args)
