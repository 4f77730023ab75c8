"""The ladder of ways to make a step fit: every rung is a plan that holds, the fastest first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.api.ladder import ladder
from memopt.api.reserved import soon_within_card
from memopt.errors import InfeasibleBudgetError
from memopt.models import optimizer_names
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.network import Network
from memopt.models.options import StepOptions
from memopt.profiler.adapters import Adapted, adapted
from memopt.profiler.estimate import estimate_model
from memopt.profiler.shallow import KEPT, block_lists, meta_copy
from memopt.profiler.variants import frozen_weights, in_four_bits
from memopt.programs.liveness import store_all
from memopt.programs.validate import validate
from memopt.report.ladder import OUTSIDE, Ladder, Rung, next_steps
from memopt.step.loss import Loss

WIDTH, WORDS, DEPTH = 32, 64, 8
DEVICE = Device(
    "card",
    capacity_bytes=2**30,
    to_host_bytes_per_s=4e9,
    flops_per_s={"float32": 1e12, "bfloat16": 4e12},
    memory_bytes_per_s=1e11,
    launch_latency_s=1e-6,
    block_bytes=512,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.flatten())


def made(budget: int | None = None, width: int = WIDTH, **how: Any) -> Ladder:
    with torch.device("meta"):
        model = Language(width)
    ids = torch.zeros(4, 32, dtype=torch.long)
    step = StepOptions(loss_fn=lambda loss: loss)
    given = {"device": DEVICE, "budget": budget, "step": step, "progress": False, "rank": 4}
    return ladder(model, ids, **(given | how))


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
    (less, *_) = steps = found.next_steps()
    best = found.best()
    assert best is not None
    assert steps == next_steps(best, (rung for rung in found.rungs if rung.fits))
    assert f"Next: {less}." in str(found)
    assert less.rung.peak_bytes == best.peak_bytes + less.more_bytes  # type: ignore[operator]
    assert [one["more_bytes"] for one in found.figures()["next"]] == [x.more_bytes for x in steps]


@pytest.mark.parametrize(
    ("lora", "share", "name", "ranks"),
    [
        (4, 0.8, "moved frozen weights", 1),
        (0, 0.6, "moved parameters and state", 1),
        (0, 0.75, "moved parameters and state", 2),
    ],
    ids=["frozen weights", "all", "shards"],
)
def test_what_does_not_fit_even_without_activations_moves(
    lora: int, share: float, name: str, ranks: int
) -> None:
    heard: list[Rung] = []
    device = replace(DEVICE, network=Network(1e10, 1e11, 8)) if ranks > 1 else DEVICE
    given: Any = {"device": device, "ranks": ranks, "width": 256, "only": "asked", "lora": lora}
    roomy = made(**given)
    budget = int(share * roomy.peak_bytes)
    assert budget < roomy.rungs[0].plan.resident_bytes  # type: ignore[union-attr]
    found = made(budget, heard=heard.append, **given)
    check(found)
    best = found.best_as_asked()
    assert best is not None
    assert (best.name, best in heard) == (name, True)
    assert best.step_time_s > roomy.rungs[0].step_time_s  # type: ignore[operator]
    assert best.plan is not None
    assert best.plan.program.has_transfers
    assert best.host_bytes == best.plan.host_peak_bytes > 0
    used = {"compute", "from host", *["to host"] * (not lora), *["network"] * (ranks > 1)}
    assert best.busy.keys() == used
    assert all(0 < share <= 1 for share in best.busy.values())
    assert f"\n{name}: busy are " in str(found)


def test_tiles_of_tokens_are_for_long_sequences_that_nothing_else_fits() -> None:
    with torch.device("meta"):
        model = Language()
    given: Any = {"device": DEVICE, "progress": False, "only": "asked"}
    given["step"] = StepOptions(loss_fn=lambda loss: loss)
    long = torch.zeros(1, 8192, dtype=torch.long)
    tight = ladder(model, long, budget=2**26, **given)
    needed: dict[bool, int] = {}
    for rung in tight.rungs:
        tiled = "tiles of tokens" in rung.changes
        if rung.needed_bytes is not None:
            needed[tiled] = min(rung.needed_bytes, needed.get(tiled, rung.needed_bytes))
    assert needed[True] < needed[False]
    found = ladder(model, long, budget=needed[True], **given)
    check(found)
    assert any("tiles of tokens" in rung.changes for rung in found.rungs if rung.fits)
    short = ladder(model, long[:, :64], budget=2**26, **given)
    assert not any("tiles of tokens" in rung.changes for rung in short.rungs)


def test_weights_in_four_bits_are_made_for_each_reader() -> None:
    with torch.device("meta"):
        model = adapted(Language(), 4, inside=["blocks"])
    ids = torch.zeros(4, 32, dtype=torch.long)
    graph = estimate_model(model, ids, DEVICE, loss=Loss(lambda loss: loss)).graph
    packed = in_four_bits(graph, 4, DEVICE)
    frozen = frozen_weights(graph)
    assert len(frozen) == 2 * DEPTH
    readers = sum(len(graph.readers[t]) for t in frozen)
    made = [x for x in packed.operators if x.target == "memopt.dequantized"]
    assert len(made) == readers == len(packed.operators) - len(graph.operators)
    assert {x.phase.value for x in made} == {"forward", "backward"}
    # 4 bits, a byte for each 64 elements, and 4 for each 256 of those, in blocks.
    elements = 4 * WIDTH * WIDTH
    held = elements // 2 + -(-(elements // 64 + 4) // 512) * 512
    assert {packed.tensors[t].size_bytes for t in frozen} == {held}
    assert validate(packed, store_all(packed)) is None


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


def test_a_rung_takes_the_update_of_the_cluster() -> None:
    (rung,) = made(only="asked").rungs
    assert rung.plan is not None
    graph = rung.plan.graph
    trained = sum(graph.tensors[t].size_bytes for t in graph.gradients)
    # torch's AdamW reads and writes 80 bytes for a parameter of four.
    update_s = 20 * trained / DEVICE.memory_bytes_per_s
    assert update_s == pytest.approx(
        optimizer_names.update_s("adamw", trained, 2 * trained, DEVICE)
    )
    assert rung.step_time_s == pytest.approx(rung.plan.step_time_s + update_s)
    (without,) = made(only="asked", optimizer=None).rungs
    assert without.plan is not None
    assert without.step_time_s == without.plan.step_time_s


@pytest.mark.parametrize(("beside", "tried"), [(0, [100, 91]), (9, [91]), (60, [40, 55])])
def test_soon_within_what_the_allocator_reserves(beside: int, tried: list[int]) -> None:
    asked: list[int] = []

    def solve_for(limit: int) -> Any:
        asked.append(limit)
        if limit < 55:
            raise InfeasibleBudgetError("too small", limit, 55)
        reserved = SimpleNamespace(reserved_peak_bytes=limit + 9)
        return SimpleNamespace(budget=limit, reserved=reserved)

    assert soon_within_card(solve_for, 100, 100, beside).budget == tried[-1]
    assert asked == tried
