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

WIDTH, WORDS, DEPTH = 32, 64, 7
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


@pytest.fixture(scope="module")
def tight() -> Ladder:
    roomy = made(only="asked")
    assert roomy.fits
    assert roomy.best() is roomy.rungs[0]
    assert sum(size for what, size in roomy.parts if what not in OUTSIDE) == roomy.peak_bytes
    return made(int(0.8 * roomy.peak_bytes))


def test_every_rung_that_fits_has_a_valid_plan(tight: Ladder) -> None:
    fitting = [rung for rung in tight.rungs if rung.fits]
    assert not tight.fits
    assert len(fitting) >= 4
    for rung in fitting:
        assert rung.plan is not None
        assert rung.peak_bytes is not None
        assert rung.peak_bytes <= tight.budget_bytes
        assert validate(rung.plan.graph, rung.plan.program, Budget(tight.budget_bytes)) is None
    rates = [rung.samples_per_s or 0.0 for rung in fitting]
    assert rates == sorted(rates, reverse=True)
    assert tight.best() is fitting[0]


def test_the_ladder_names_its_ways_and_what_they_take(tight: Ladder) -> None:
    names = {rung.name for rung in tight.rungs}
    assert {"as asked", "bfloat16", "bfloat16, LoRA r=4", "bfloat16, QLoRA r=4"} <= names
    assert "recompute plan" in names
    text, figures = str(tight), tight.figures()
    assert "It does not fit" in text
    best = tight.best()
    assert best is not None
    assert f"It fits with: {best.name}." in text
    assert figures["parts_bytes"]["exp_avg"] == figures["parts_bytes"]["parameters"]
    assert [row["name"] for row in figures["rungs"]] == [rung.name for rung in tight.rungs]


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
