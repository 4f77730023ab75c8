"""A step of more blocks than were captured is the step that the whole model's capture gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.more_blocks import UnequalBlocksError, with_more_blocks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, width)
        self.down = nn.Linear(width, 8, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x) * turns)))


class Deep(nn.Module):
    """Blocks that share `turns` and, in `all_read`, one result that reads what each makes."""

    def __init__(self, depth: int, odd_width: int = 16, all_read: bool = False) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.ones(8))
        widths = [odd_width if i == 2 else 16 for i in range(depth)]
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList(map(Block, widths))})
        self.head, self.all_read = nn.Linear(8, 3), all_read

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for block in self.inner["blocks"]:
            x = block(x, self.turns.sigmoid())
            made.append(x)
        return self.head(torch.stack(made).sum(0) if self.all_read else x)


def graph_of(depth: int, **how: object) -> Graph:
    with torch.device("meta"):
        model, x = Deep(depth, **how), torch.ones(4, 8)  # type: ignore[arg-type]
    return estimate_model(model, x, find_device("H100")).graph


def test_more_blocks_are_those_of_a_whole_capture() -> None:
    made, whole = with_more_blocks(graph_of(6), "inner.blocks", 6, 2), graph_of(8)
    assert [(x.target, x.module, x.phase) for x in made.operators] == [
        (x.target, x.module, x.phase) for x in whole.operators
    ]
    assert made.resident_bytes == whole.resident_bytes
    assert len(made.gradients) == len(whole.gradients)
    own, others = (replay(graph, store_all(graph)) for graph in (made, whole))
    assert own.step_bytes == others.step_bytes
    assert own.time_s == pytest.approx(others.time_s)


@pytest.mark.parametrize("how", [{"odd_width": 24}, {"all_read": True}], ids=str)
def test_blocks_that_differ_are_refused(how: dict[str, object]) -> None:
    with pytest.raises(UnequalBlocksError):
        with_more_blocks(graph_of(6, **how), "inner.blocks", 6, 2)
