"""Four micro-batches, clipped, of real architectures: eager's loop, within the planned peak."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of
from memopt.step.inputs import to_call
from tests import zoo
from tests.whole_steps.accumulated import CPU, LINK

COUNT, CLIP_NORM = 4, 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moved", [False, True], ids=["resident", "a quarter"])
@pytest.mark.parametrize("name", [family.name for family in zoo.FAMILIES])
def test_two_steps_equal_the_loop_within_the_planned_peak(name: str, moved: bool) -> None:
    """Moved: at a quarter of parameters, gradients and state, or, where four micro-batches' inputs
    and one layer's update leave no room for that, at the smallest budget."""
    family = zoo.get(name)
    torch.manual_seed(0)
    model = family.build("tiny")
    twin = copy.deepcopy(model)
    inputs = family.inputs("tiny")
    optimizer, expected = (torch.optim.AdamW(m.parameters(), lr=0.001) for m in (model, twin))

    def planned(budget: int | None, movable: Any = "all" if moved else ()) -> memopt.Plan:
        return memopt.plan(
            model, inputs, loss_fn=family.loss, optimizer=optimizer, strategy="offload-graph",
            movable=movable, micro_batches=COUNT, clip_norm=CLIP_NORM, budget=budget,
            device=LINK, progress=False,
        )  # fmt: skip

    try:
        plan = planned(sum(p.nbytes for p in model.parameters()) if moved else None)
    except memopt.InfeasibleBudgetError as error:
        plan = planned(error.smallest_budget_bytes)
    step = plan.train_step(model, family.loss, optimizer)
    call = to_call(inputs)
    for number in range(2):
        torch.manual_seed(number)
        with metered(CPU) as use:
            losses = step.accumulate([(inputs, ())] * COUNT)
        torch.manual_seed(number)
        for loss in losses:
            wanted = family.loss(twin(*call.args, **call.kwargs))
            (wanted / COUNT).backward()
            assert torch.equal(loss, wanted)
        norm = nn.utils.clip_grad_norm_(twin.parameters(), CLIP_NORM)
        assert torch.equal(step.gradient_norm, norm)
        expected.step()
        expected.zero_grad()
        del wanted
    pairs = zip(model.state_dict().items(), twin.state_dict().values(), strict=True)
    for (key, found), value in pairs:
        assert torch.equal(found, value), key
    peak = plan.resident_bytes - backend_of(CPU).step_scalars_bytes + use.peak_bytes
    assert peak == pytest.approx(plan.peak_bytes, rel=0.005)
