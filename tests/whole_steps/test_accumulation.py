"""Whole steps over micro-batches, clipped by the global norm, with a GradScaler: eager's loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import ExecutionError, GuardError
from memopt.models.graph import Phase
from tests.whole_steps.accumulated import Net, Pair, deep, images, momentum, rows


@pytest.mark.parametrize(
    "rules",
    [
        {"micro_batches": 4, "clip_norm": 0.1},
        {"micro_batches": 2, "optimizer": momentum, "interpreted": True},
        {"clip_norm": 100.0, "scale": 2.0**15, "strategy": "rotor", "whole_step": True},
        {"scale": 3.0, "optimizer": momentum},
    ],
    ids=["clipped", "interpreted", "recomputing", "scaled alone"],
)
def test_steps_equal_the_loop(rules: dict[str, Any]) -> None:
    pair = Pair(**rules)
    pair.check_steps(range(4))
    assert pair.metered_peak() == pytest.approx(pair.plan.peak_bytes, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["olla", "offload-graph", "placed"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_strategies(strategy: str, norm_type: float) -> None:
    placed = {"strategy": "olla", "place": True} if strategy == "placed" else {"strategy": strategy}
    pair = Pair(4, 0.1, norm_type, 2.0**12, **placed)
    pair.check_steps(range(5))
    peak = pair.metered_peak()
    assert peak <= pair.plan.peak_bytes
    assert peak == pytest.approx(pair.plan.peak_bytes, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 2.0**15])
def test_a_quarter_of_the_states(scale: float | None) -> None:
    pair = Pair(4, 0.1, scale=scale, make=deep, batches=rows, share=0.25)
    assert 4 * pair.plan.budget <= pair.states_bytes
    pair.check_steps(range(20))
    peak = pair.metered_peak()
    assert peak <= pair.plan.budget
    assert peak == pytest.approx(pair.plan.peak_bytes, rel=0.005)
    graph = pair.plan.graph
    names = {graph.tensors[x.tensor].name for x in pair.plan.program if hasattr(x, "tensor")}
    assert pair.step.host_bytes > pair.states_bytes // 2
    assert any(name.startswith("state of") for name in names)


@pytest.mark.slow
def test_half_of_the_states() -> None:
    pair = Pair(2, 0.1, make=lambda: deep(depth=4), batches=rows, share=0.5)
    pair.check_steps(range(3))
    assert pair.metered_peak() <= pair.plan.budget
    assert pair.step.host_bytes


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Everything at once."""
    return Pair(3, 0.1, math.inf, 2.0**10)


def test_scaled_steps_equal_the_loop(pair: Pair) -> None:
    pair.check_steps(range(4))
    assert pair.metered_peak() == pytest.approx(pair.plan.peak_bytes, rel=0.005)


def test_gradients_are_added_up_in_place(pair: Pair) -> None:
    graph = pair.plan.graph
    gradients = {one.name: one for one in graph.operators if one.phase is not Phase.FORWARD}
    sums = [one for one in gradients.values() if one.target == "aten.add.Tensor" and one.in_place]
    trained = sum(p.requires_grad for p in Net().parameters()) - 2
    assert len(sums) == 2 * trained
    scaled = [one for one in gradients.values() if one.target == "aten.mul.Tensor" and one.in_place]
    assert len(scaled) >= trained
    norms = [i for i, one in enumerate(graph.operators) if "_foreach_norm" in one.target]
    assert len(norms) == trained
    # Each norm comes as soon as its gradient is there, not after all of them.
    last = max(graph.producer[graph.operators[i].reads[0]] for i in norms)
    assert norms[0] < last


class Shared(nn.Module):
    """Two biases with one gradient, a parameter with the input as its gradient, and rows that the
    forward itself changes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, max_norm=0.5)
        self.one, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        found = self.rows(x) + self.one + self.other
        return (found * self.weight).sum(0).tanh()


def test_gradients_that_share_memory_and_parameters_that_the_forward_changes() -> None:
    def batches(number: int, count: int) -> list[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(number)
        return [
            (torch.randint(0, 6, (8,), generator=random), torch.rand(4, generator=random))
            for _ in range(count)
        ]

    Pair(3, 0.2, make=Shared, batches=batches).check_steps(range(3))


@pytest.mark.slow
def test_bfloat16_and_mixed_dtypes() -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 32, dtype=torch.bfloat16), nn.Tanh(), Casting(), nn.Linear(32, 10)
        )

    def batches(number: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return [(x.to(torch.bfloat16), y) for x, y in rows(number, count)]

    Pair(2, 0.05, scale=2.0**8, make=mixed, batches=batches).check_steps(range(3))


class Casting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_plans_from_files_run(pair: Pair, tmp_path: Path) -> None:
    pair.plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    assert loaded.record is not None
    assert loaded.record.rules == pair.plan.record.rules
    pair.step = pair.made(loaded)
    pair.check_steps(range(3))


def test_misuse_is_refused(pair: Pair) -> None:
    data = images(0, 3)
    with pytest.raises(GuardError, match="takes 3 micro-batches: call"):
        pair.step(data[0][0], targets=data[0][1])
    with pytest.raises(GuardError, match="takes 3 micro-batches and was given 2"):
        pair.step.accumulate(data[:2])
    with pytest.raises(GuardError):
        pair.step.accumulate([*data[:2], (data[1][0][:2], data[1][1][:2])])
    pair.model.head.weight.grad = torch.zeros(5, 8)
    with pytest.raises(ExecutionError, match="has a gradient from before"):
        pair.step.accumulate(data)
    pair.model.zero_grad()
    with pytest.raises(ValueError, match="that a GradScaler scales: pass scaler="):
        pair.plan.train_step(pair.model, pair.loss, pair.optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 0}, "micro_batches is a number"),
        ({"clip_norm": 0.0}, "clip_norm is a positive number"),
        ({"clip_norm": 1.0, "norm_type": 0.0}, "norm_type is positive"),
        ({"micro_batches": 2, "strategy": "rotor"}, "rotor plans no steps of several"),
        ({"clip_norm": 1.0, "whole_step": False}, "are for whole steps"),
        ({"clip_norm": 1.0, "optimizer": "adamw"}, "whole_step=True needs loss_fn"),
    ],
)
def test_requests_are_checked(arguments: dict[str, Any], message: str) -> None:
    model, (x, y) = Net(), images(0, 1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizer": optimizer, "strategy": "store-all", **arguments}
    with pytest.raises(ValueError, match=message):
        memopt.plan(
            model, x, loss_fn=nn.functional.cross_entropy, targets=(y,), progress=False, **given
        )


@pytest.mark.parametrize(
    ("trained", "dtype", "message"),
    [(0, torch.float16, "refuses float16 gradients"), (1, torch.float32, "need gradients")],
)
def test_what_cannot_be_unscaled_is_refused(trained: int, dtype: torch.dtype, message: str) -> None:
    model = nn.ModuleList(nn.Linear(2, 2, dtype=dtype) for _ in range(2))
    model.forward = lambda x: model[0](x)
    optimizer = torch.optim.SGD(model[trained].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        memopt.plan(
            model,
            torch.rand(1, 2, dtype=dtype),
            loss_fn=torch.sum,
            optimizer=optimizer,
            strategy="store-all",
            scaler=torch.amp.GradScaler("cpu"),
            progress=False,
        )


def test_a_gradient_that_no_update_ends_is_not_clipped() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.rand(1, 4), ())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not train 0\.weight"):
        memopt.plan(
            model,
            x,
            loss_fn=torch.sum,
            targets=y,
            optimizer=optimizer,
            strategy="store-all",
            clip_norm=1.0,
            progress=False,
        )
