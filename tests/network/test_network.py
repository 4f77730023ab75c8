"""The network model: its formulas by hand, its presets, and where it is measured."""

from __future__ import annotations

import gc
import math
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.network import Network, Protocol
from memopt.models.presets import H100
from memopt.pricing.measure import network_costs
from memopt.profiler.estimate import estimate_model
from memopt.programs.serialize import dumps, loads
from memopt.step import rank_groups
from memopt.step.collectives import is_collective
from tests.network.sharded import alone, fake_ranks, layers, sharded
from tests.network.test_capture import lowered

SIZE = 8 * 10**9
GATHER, REDUCE = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE
EXCHANGE, BROADCAST = CollectiveKind.ALL_TO_ALL, CollectiveKind.BROADCAST
SLOW = Protocol(node_latency_s=1.0, network_latency_s=10.0)
BARE = Network(network_bytes_per_s=10e9, node_bytes_per_s=40e9, ranks_per_node=8)


def network(*protocols: Protocol) -> Network:
    return Network(10e9, 40e9, 8, protocols or (SLOW,))


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        (Collective(GATHER, 1, SIZE), 0.0),
        # In a node: 7 of 8 parts at 40 GB/s.
        (Collective(GATHER, 8, SIZE), 7 / 8 * 0.2),
        # 4 nodes of 8: eight adapters together are faster than a rank's links.
        (Collective(GATHER, 32, SIZE), 31 / 32 * 0.2),
        # 8 ranks, each on a node of its own, or two on each.
        (Collective(GATHER, 8, SIZE, stride=8), 7 / 8 * 0.8),
        (Collective(GATHER, 8, SIZE, stride=4), 7 / 8 * 0.4),
        (Collective(CollectiveKind.REDUCE_SCATTER, 8, SIZE), 7 / 8 * 0.2),
        (Collective(REDUCE, 8, SIZE), 2 * 7 / 8 * 0.2),
        (Collective(BROADCAST, 8, SIZE), 0.2),
        (Collective(EXCHANGE, 8, SIZE), 7 / 8 * 0.2),
        # 16 ranks on 2 nodes: half of a rank's tensor leaves through its own adapter.
        (Collective(EXCHANGE, 16, SIZE), 8 / 16 * 0.8),
    ],
)
def test_rates(collective: Collective, seconds: float) -> None:
    assert BARE.time_s(collective) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        (Collective(GATHER, 8, 0), 7.0),
        (Collective(GATHER, 32, 0), 28.0 + 3 * 10.0),
        # By a tree: up and down 3 levels in the node and 2 between nodes.
        (Collective(REDUCE, 32, 0), 2 * (3.0 + 2 * 10.0)),
        (Collective(BROADCAST, 8, 0, stride=8), 3 * 10.0),
        (Collective(EXCHANGE, 8, 0), 7.0),
    ],
)
def test_latencies(collective: Collective, seconds: float) -> None:
    assert network().time_s(collective) == pytest.approx(seconds)


def test_the_fastest_protocol() -> None:
    quick = Protocol(start_s=0.5, share=0.1)
    both = network(SLOW, quick)
    assert both.time_s(Collective(GATHER, 8, 0)) == 0.5
    many = 400 * SIZE
    assert both.time_s(Collective(GATHER, 8, many)) == network().time_s(Collective(GATHER, 8, many))


def test_presets_and_files() -> None:
    gather = Collective(GATHER, 8, 2**30)
    # nccl-tests' bus bandwidth on an HGX H100.
    assert 7 / 8 * 2**30 / H100.collective_time_s(gather) == pytest.approx(360e9, rel=0.02)
    assert loads(dumps(H100)) == H100
    assert b"network" not in dumps(Device())
    assert Device().collective_time_s(gather) == 0.0


def test_refused() -> None:
    with pytest.raises(ValueError, match="network_bytes_per_s"):
        Network(network_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="ranks_per_node"):
        Network(ranks_per_node=0)
    with pytest.raises(ValueError, match="start_s"):
        Protocol(start_s=math.nan)
    with pytest.raises(ValueError, match="share"):
        Protocol(share=0.0)
    with pytest.raises(ValueError, match="ranks and stride"):
        Collective(GATHER, 0, 1)


def test_estimates_price_collectives_by_the_network() -> None:
    with fake_ranks(16):
        graph = estimate_model(sharded(layers(1, 64)), torch.randn(3, 64), H100).graph
    sent = [x for x in graph.operators if x.collective is not None]
    assert len(sent) == 4
    for operator in sent:
        assert operator.collective is not None
        assert operator.time_s == H100.collective_time_s(operator.collective) > 1e-5


def test_measured_where_a_group_runs() -> None:
    with alone():
        lowering = lowered(sharded(layers(1)), torch.randn(3, 6))
        costs = network_costs(lowering.signatures, torch.device("cpu"))
    sent = {s.text for s in lowering.signatures if is_collective(s.target)}
    assert set(costs) == sent
    assert len(sent) == 4
    weight = max(costs.values(), key=lambda cost: cost.output_bytes)
    assert weight.output_bytes == (36 * 4,)
    assert all(cost.time_s > 0 for cost in costs.values())


def test_groups_go_with_the_default_group() -> None:
    """Another default group may come to the address of one that was destroyed."""
    with alone():
        group = rank_groups.group_of((0,), "kind")
        assert group is rank_groups.group_of((0,), "kind")
        assert group.gathered("alone", "a model") == ["alone"]
        gone = weakref.ref(group)
        del group
    gc.collect()
    assert gone() is None


def test_the_timeout_of_a_group_without_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nccl's is: memopt's own group of ranks waits as long, not for torch's half an hour."""
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    kinds = {torch.device("cuda"): backend}

    def found(kind: torch.device) -> SimpleNamespace:
        if kind not in kinds:
            raise RuntimeError("No backend type associated with device type cpu")
        return kinds[kind]

    world = SimpleNamespace(_device_types=list(kinds), _get_backend=found)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    assert rank_groups.timeout() == timedelta(seconds=7)
