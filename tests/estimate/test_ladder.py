"""The ladder of ways to make a step fit: every rung is a plan that holds, the fastest first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.api.ladder import ladder
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.options import StepOptions
from memopt.profiler.adapters import Adapted, adapted
from memopt.profiler.shallow import KEPT, block_lists, meta_copy
from memopt.programs.validate import validate
from memopt.report.ladder import OUTSIDE, Ladder

WIDTH, WORDS, DEPTH = 32, 64, 8
DEVICE = Device(
    "card",
    capacity_bytes=2**30,
    to_host_bytes_per_s=1e9,
    flops_per_s={"float32": 1e12, "bfloat16": 4e12},
    memory_bytes_per_s=1e11,
    launch_latency_s=1e-6,
    block_bytes=512,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.flatten())


def made(budget: int | None = None, **how: Any) -> Ladder:
    with torch.device("meta"):
        model = Language()
    ids = torch.zeros(4, 32, dtype=torch.long)
    step = StepOptions(loss_fn=lambda loss: loss)
    given = {"device": DEVICE, "budget": budget, "step": step, "progress": False, "rank": 4}
    return ladder(model, ids, **given, **how)


def check(found: Ladder) -> None:
    """Check that rungs that fit have valid plans within the budget, the fastest first."""
    fitting = [rung for rung in found.rungs if rung.fits]
    for rung in fitting:
        assert rung.plan is not None
        assert rung.peak_bytes is not None
        assert rung.peak_bytes <= found.budget_bytes
        assert validate(rung.plan.graph, rung.plan.program, Budget(found.budget_bytes)) is None
    rates = [rung.rate_of_one for rung in fitting]
    assert rates == sorted(rates, reverse=True)
    assert list(found.rungs[: len(fitting)]) == fitting
    assert [row["name"] for row in found.figures()["rungs"]] == [rung.name for rung in found.rungs]


def tight_budget(roomy: Ladder) -> int:
    return roomy.peak_bytes - dict(roomy.parts)["activations"] // 3


def test_a_step_that_fits_and_one_that_fits_with_a_plan() -> None:
    roomy = made(only="asked")
    assert roomy.fits
    assert roomy.best() is roomy.rungs[0]
    parts = roomy.figures()["parts_bytes"]
    assert parts["exp_avg"] == parts["parameters"]
    assert sum(size for what, size in roomy.parts if what not in OUTSIDE) == roomy.peak_bytes
    tight = made(tight_budget(roomy), only="asked")
    assert not tight.fits
    best = tight.best()
    assert best is not None
    assert best.name == "recompute plan"
    assert f"It fits with: {best.name}." in str(tight)
    check(tight)


def test_the_whole_ladder() -> None:
    found = made(tight_budget(made(only="asked")))
    check(found)
    fitting = {rung.name for rung in found.rungs if rung.fits}
    assert {"bfloat16", "recompute plan", "activation offload"} <= fitting
    assert {"bfloat16, LoRA r=4", "bfloat16, QLoRA r=4"} <= fitting


def test_a_copy_with_few_blocks_leaves_the_model_as_it_is() -> None:
    model = Language()
    (blocks,) = block_lists(model)
    few = meta_copy(model, (blocks,))
    assert (len(model.blocks), len(few.blocks)) == (DEPTH, KEPT)  # type: ignore[arg-type]
    assert {p.device.type for p in few.parameters()} == {"meta"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_adapters_are_what_is_trained() -> None:
    model = adapted(Language(), 3, inside=["blocks"])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * DEPTH
    assert isinstance(model.blocks[0].up, Adapted)  # type: ignore[index, union-attr]
    assert type(model.head) is nn.Linear
    assert model(torch.zeros(1, 3, dtype=torch.long)).isfinite()


def test_a_budget_without_a_unit_is_asked_about() -> None:
    with pytest.raises(ValueError, match='did you mean "24GiB"'):
        made(24)
