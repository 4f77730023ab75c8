"""Forwards that look at values of their own, on ranks that share a model: all run a call without a
plan where a value of one is not as usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memopt
from memopt.errors import GuardError, RankError
from memopt.executor.in_step import InStep
from memopt.executor.installed import Installed
from memopt.step.assumed import AssumptionError, nothing_assumed
from memopt.step.rank_groups import RankGroup
from tests.distributed import cases, processes

STEPS = 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if not torch.isfinite(h).all():
            h = torch.clamp(h, -1, 1)
        return self.down(torch.relu(h))


def trained(model: nn.Module, rank: int, unusual: tuple[int, int]) -> tuple[list[float], Any]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    losses = []
    for step in range(STEPS):
        x = torch.randn(8, 16)
        if (step, rank) == unusual:
            x[0] = 3e38
        if step != 1:  # a call that finds gradients
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, cases.own(model)


def looking(rank: int, ranks: int) -> dict[str, Any]:
    """Whether training is that without memopt, and how many of its calls were planned."""
    mesh = init_device_mesh("cpu", (ranks,))
    layout = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    found: dict[str, Any] = {}
    for name in ("shard", "tensor"):
        ends = []
        for planned in (False, True):
            torch.manual_seed(0)
            model: Any = Looking()
            if name == "shard":
                memopt.shard(model, mesh)
            else:
                parallelize_module(model, mesh, layout)
            if planned:
                memopt.wrap(model, "min", "rotor", progress=False)
            # The ranks of a tensor-parallel group have the same data.
            data, unusual = (rank, (2, 1)) if name == "shard" else (0, (2, 0))
            ends.append(trained(model, data, unusual))
        same = ends[0][0] == ends[1][0] and cases.same(ends[0][1], ends[1][1])
        found[name] = same, memopt.running(model).calls.planned
    return found


def test_ranks_agree_on_how_a_forward_goes(tmp_path: Path) -> None:
    for found in processes.results(processes.run(looking, 2, tmp_path)):
        assert found == {"shard": (True, STEPS - 1), "tensor": (True, STEPS - 1)}


class Checked(nn.Module):
    """Asserts something of its input, before or after its last layer is gathered."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.first, self.last, self.late = nn.Linear(8, 8), nn.Linear(8, 8), late

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.late:
            h = self.last(h)
        assert x.max() < 50, "too large"
        return h if self.late else self.last(h)


def asserting(rank: int, ranks: int, late: bool) -> str:
    """What a rank says where the assertion of the last one fails."""
    model = memopt.shard(Checked(late), init_device_mesh("cpu", (ranks,)))
    memopt.wrap(model, "min", "rotor", progress=False)
    for step in range(3):
        x = torch.full((4, 8), 100.0 if step == 2 and rank == ranks - 1 else 1.0)
        try:
            model(x).square().mean().backward()
        except (AssertionError, memopt.RankError) as error:
            return " ".join([str(error), *getattr(error, "__notes__", ())])
    return ""


@pytest.mark.parametrize("late", [False, True])
def test_an_assertion_that_fails_on_one_rank_is_told_on_all(late: bool, tmp_path: Path) -> None:
    found = processes.results(processes.run(asserting, 2, tmp_path, late, timeout_s=5))
    said = "rank 1 failed in the unplanned forward of a planned step: AssertionError: too large"
    assert all(said in one for one in found), found


def test_a_forward_that_looks_at_nothing_exchanges_nothing() -> None:
    def nothing(_: Any) -> Any:
        raise AssertionError

    program = Installed(nothing, nothing, (), (), "", partial=nothing)
    ranks: Any = None  # not asked
    assert InStep(ranks).installed(program).look is nothing_assumed


@pytest.mark.parametrize(
    ("fails", "elsewhere", "told", "failed"),
    [
        (True, "KeyError: 1", KeyError, ""),
        (True, "", KeyError, "rank 0 failed in the unplanned forward of a planned step: KeyError"),
        (False, "KeyError: 1", RankError, "rank 1 failed in the unplanned forward of a planned"),
    ],
)
def test_ranks_whose_forwards_fail_on_all_are_in_step(
    fails: bool, elsewhere: str, told: type[Exception], failed: str
) -> None:
    def look(_: Any) -> None:
        raise AssumptionError("otherwise")

    def forward() -> None:
        if fails:
            raise KeyError(1)

    def exchanged(own: str, doing: str) -> list[str]:
        return [own, "otherwise" if "looks" in doing else elsewhere]

    ranks: Any = mock.Mock(members=(0, 1), group=RankGroup((0, 1), {}), exchanged=exchanged)
    ranks.report_failure = lambda how, _: f"rank 0 {how}"
    program = InStep(ranks).installed(Installed(look, look, (), (), "", look=look, partial=look))
    for _ in range(1 if failed else 2):
        with pytest.raises(AssumptionError):
            program.look([])
        with pytest.raises(told):
            program.failing(forward, "the unplanned forward")()
        assert ranks.group.failed.startswith(failed)
        assert bool(failed) == bool(ranks.group.failed)


def test_a_call_without_a_plan_beside_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gathers(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("[gloo/transport] Timed out waiting 12ms for send operation")
            return super().forward(input)

    model, x = Gathers(4, 4), torch.ones(2, 4)
    applied = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    wrapped = memopt.wrap(Gathers(4, 4), "min", progress=False)
    lost = mock.Mock(members=(0, 1))
    monkeypatch.setattr("memopt.executor.unplanned.ranks_of", lambda _: lost)
    for one in (applied.eval(), wrapped.eval()):
        with pytest.raises(RankError, match=r"another rank is gone.*a call runs unplanned"):
            one(x)
    noted = mock.Mock()
    monkeypatch.setattr("memopt.executor.unplanned.note_failure", noted)
    with pytest.raises(GuardError):
        applied.train()(torch.ones(3, 4))
    noted.assert_called_once()
