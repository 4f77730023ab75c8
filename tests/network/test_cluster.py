"""Plans for clusters that are not there: one rank's figures, what the network takes and hides."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import memopt
from memopt.api.cluster import tokens_of
from memopt.models.network import Network
from memopt.models.optimizer_names import update_bytes
from memopt.models.presets import H100
from memopt.report.lanes import Lane, predicted_lanes, trace_events
from memopt.report.timeline_plot import lanes
from memopt.report.work import gathered
from tests.network.sharded import alone, layers, sharded

MESH = memopt.Mesh(data=8)


class Words(nn.Module):
    """Token ids through an embedding and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rest = nn.Embedding(100, 256), layers(3, 256)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.rest(self.words(ids))
        return found


def rank(_mesh: DeviceMesh) -> nn.Module:
    return sharded(Words())


IDS = torch.zeros(4, 512, dtype=torch.int64)


@functools.cache
def planned(mesh: memopt.Mesh, **more: object) -> memopt.Plan:
    chosen: dict[str, object] = {"device": "H100", "mode": "estimate", "progress": False, **more}
    return memopt.plan(rank, IDS, mesh=mesh, **chosen)  # type: ignore[arg-type]


def test_mesh() -> None:
    mesh = memopt.Mesh(replicas=2, data=64, tensor=8)
    assert (mesh.ranks, mesh.shape, mesh.batches) == (1024, (2, 64, 8), 128)
    assert str(mesh) == "2 replicas × 64 data × 8 tensor"
    with pytest.raises(ValueError, match="name its dimensions"):
        memopt.Mesh()
    with pytest.raises(ValueError, match="at least 1"):
        memopt.Mesh(data=0)


def test_a_plan_of_one_rank() -> None:
    small, large = planned(MESH), planned(memopt.Mesh(data=512))
    # Shards of 512 are smaller than of 8; the gathered parameters are as large.
    assert small.graph.resident_bytes > large.graph.resident_bytes
    for plan, ranks in ((small, 8), (large, 512)):
        assert plan.stats["ranks"] == ranks
        per_rank = IDS.numel() / plan.step_time_s
        assert plan.stats["tokens_per_s"] == pytest.approx(per_rank * ranks)
        assert plan.stats["tokens_per_s_per_rank"] == pytest.approx(per_rank)
        network_s = plan.stats["network_s"]
        assert isinstance(network_s, float)
        assert network_s >= plan.graph.network_time_s > 0
    assert "One of 512 ranks (512 data)" in str(large)
    assert "hidden" in large.summary()
    assert not dist.is_initialized()


class Scaled(nn.Module):
    """Asks whether it has a parameter, as many modules do, or not."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.asks and self.scale is None:
            return x
        found: Tensor = self.last(x * self.scale)
        return found


def test_a_parameter_that_is_asked_for_is_gathered_once() -> None:
    def sent(asks: bool) -> list[tuple[str, int]]:
        how = {"strategy": "store-all", "device": "H100", "mode": "estimate", "progress": False}

        def build(mesh: DeviceMesh) -> nn.Module:
            return memopt.shard(nn.Sequential(Scaled(asks), Scaled(asks)), mesh)

        plan = memopt.plan(build, torch.zeros(4, 8), mesh=MESH, **how)  # type: ignore[arg-type]
        return [(one.target, len(one.writes)) for one in plan.graph.operators if one.collective]

    assert [many for _, many in sent(False)] == [3, 3, 1, 1]
    assert sent(True) == sent(False)


def test_tokens_per_second_include_the_update() -> None:
    plan = planned(MESH, optimizer="adamw")
    trained = sum(plan.graph.tensors[one].size_bytes for one in plan.graph.gradients)
    rate = H100.memory_bytes_per_s * H100.memory_fraction
    # torch's AdamW reads and writes 80 bytes for a parameter of four (`foreach`).
    assert plan.stats["update_s"] == pytest.approx(20 * trained / rate)
    per_rank = IDS.numel() / (plan.step_time_s + 20 * trained / rate)
    assert plan.stats["tokens_per_s_per_rank"] == pytest.approx(per_rank)
    assert "for the optimizer's update" in str(plan)
    assert update_bytes("adamw-fp32", 2, 12) == 3 * 2 + 2 * 12
    assert update_bytes("SGD", 4, 4) == 8 * 4


def test_the_network_is_a_lane_of_every_picture() -> None:
    plan = planned(MESH)
    step = predicted_lanes(plan)
    sent = [span for span in step.spans if span.lane is Lane.NETWORK]
    assert len(sent) == sum(
        bool(plan.graph.operators[x.op].collective) for _, x in plan.program.computes
    )
    names = {x["args"]["name"] for x in trace_events([step]) if x["name"] == "thread_name"}  # type: ignore[index]
    assert "network" in names
    assert len(lanes(plan)["collectives"][1]) == len(sent)


def test_weights_are_gathered_again_where_the_budget_asks_for_it() -> None:
    graph = planned(MESH).graph
    known = {"device": "H100", "strategy": "rotor", "progress": False}
    least = memopt.plan(graph, budget="min", **known).peak_bytes
    most = memopt.plan(graph, **known).peak_bytes
    again = []
    for budget in (least, *range(least, most, (most - least) // 12), most):
        plan = memopt.plan(graph, budget=budget, **known)
        rows = gathered(graph, plan.program)
        assert sum(row.kept + row.again for row in rows) == 7
        again.append(sum(row.again for row in rows))
        assert f"gathered again: {again[-1]} of 7 all-gathers" in plan.summary()
    # All that the backward reads again, none, and in some layers only.
    assert again[-1] == 0
    assert again[0] == max(again) >= 2
    assert any(0 < count < again[0] for count in again)


@pytest.mark.slow
def test_fits_answers_for_a_cluster() -> None:
    table = memopt.fits(
        rank, IDS, device="H100", mesh=MESH, strategies=["store-all"], progress=False
    )
    assert table.rows[0].fits
    assert "Each of 8 ranks (8 data)." in str(table)


def test_without_a_network_it_says_so() -> None:
    plan = planned(MESH, device="cpu-core")
    assert "has no network" in str(plan.notes)
    assert isinstance(H100.network, Network)


def test_refused() -> None:
    mesh = MESH
    with pytest.raises(ValueError, match="a function from a torch DeviceMesh"):
        memopt.plan(Words(), IDS, mesh=mesh, mode="estimate", device="H100", progress=False)
    with pytest.raises(ValueError, match="torchrun"):
        memopt.plan(rank, IDS, mesh=mesh, progress=False)
    with alone(), pytest.raises(ValueError, match="is initialised"):
        planned(memopt.Mesh(data=2))
    with pytest.raises(ValueError, match=r"no nn\.Module"):
        memopt.plan(lambda _mesh: 3, IDS, mesh=mesh, mode="estimate", device="H100", progress=False)


def test_tokens_are_the_ids() -> None:
    assert tokens_of({"ids": IDS, "mask": torch.ones(9000, dtype=torch.bool)}) == 2048
    assert tokens_of(torch.randn(3)) == 0
