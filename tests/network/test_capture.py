"""Collectives in the captured graph: what they are and send, and that waits are no copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from memopt.capture.capture import capture
from memopt.capture.fake import Fakes
from memopt.errors import CaptureError
from memopt.models.collective import Collective, CollectiveKind
from memopt.programs.serialize import dumps, fingerprint, loads
from memopt.step.build import Lowering, build
from memopt.step.collectives import is_wait
from memopt.step.inputs import to_call
from memopt.step.optimizer_state import optimizer_state
from tests.network.sharded import fake_ranks, layers, sharded

FLOAT = 4


def lowered(model: nn.Module, *inputs: Tensor) -> Lowering:
    return build(model, capture(model, to_call(inputs)))


def sent(lowering: Lowering) -> list[Collective]:
    return [x.collective for x in lowering.graph.operators if x.collective is not None]


def test_gathers_and_scatters_of_a_sharded_model() -> None:
    with fake_ranks(4):
        lowering = lowered(sharded(layers(2)), torch.randn(3, 6))
    weight, bias = 36 * FLOAT, 8 * FLOAT  # 6 floats padded to 4 equal shards
    gathers = [Collective(CollectiveKind.ALL_GATHER, 4, size) for size in (weight, bias)] * 2
    scatters = [Collective(CollectiveKind.REDUCE_SCATTER, 4, size) for size in (bias, weight)] * 2
    assert sent(lowering) == gathers + scatters


def test_a_wait_is_no_second_copy() -> None:
    with fake_ranks(4):
        lowering = lowered(sharded(layers(1)), torch.randn(3, 6))
    waits = [node for node in lowering.storages if is_wait(node.target)]
    assert len(waits) == 4
    for wait in waits:
        assert wait in lowering.views
        assert lowering.storages[wait] == lowering.storages[wait.all_input_nodes[0]]
    gathered = [t for t in lowering.graph.tensors if t.size_bytes == 36 * FLOAT]
    # The gathered weight, its gradient as it comes out of the product, and cut from the padding.
    assert len(gathered) == 3


class Communicating(nn.Module):
    """Every kind of collective once, each in a group of its own."""

    def __init__(self, rows: dist.ProcessGroup, columns: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        z = funcol.all_reduce(y.detach(), "sum", self.rows)
        z = z + funcol.broadcast(z, 0, self.columns)
        first, second = funcol.all_reduce_coalesced([z, z * 2], "sum", self.rows)
        exchanged = funcol.all_to_all_single_autograd(y, None, None, self.columns)
        return exchanged + first + second


def test_every_kind_and_the_ranks_of_its_group() -> None:
    with fake_ranks(8):
        groups = dist.new_group([0, 1]), dist.new_group([0, 2, 4, 6])
        lowering = lowered(Communicating(*groups), torch.randn(8, 8))
    size = 8 * 8 * FLOAT
    exchange = Collective(CollectiveKind.ALL_TO_ALL, 4, size, stride=2)
    assert sent(lowering) == [
        Collective(CollectiveKind.ALL_REDUCE, 2, size),
        Collective(CollectiveKind.BROADCAST, 4, size, stride=2),
        Collective(CollectiveKind.ALL_REDUCE, 2, 2 * size),
        exchange,
        exchange,
    ]
    coalesced = next(x for x in lowering.graph.operators if "coalesced" in x.target)
    assert len(coalesced.writes) == 2


def test_a_group_that_is_gone() -> None:
    with fake_ranks(2):
        model = sharded(layers(1))
        found = capture(model, to_call((torch.randn(3, 6),)))
    with pytest.raises(CaptureError, match="process group"):
        build(model, found)


def test_files_and_fingerprints_know_collectives() -> None:
    with fake_ranks(4):
        graph = lowered(sharded(layers(1)), torch.randn(3, 6)).graph
    assert loads(dumps(graph)) == graph
    with fake_ranks(4):
        other = dist.new_group([0, 1])
        assert other is not None
        few = lowered(Communicating(other, dist.group.WORLD), torch.randn(8, 8)).graph
        many = lowered(Communicating(dist.group.WORLD, dist.group.WORLD), torch.randn(8, 8)).graph
    assert [x.size_bytes for x in few.tensors] == [x.size_bytes for x in many.tensors]
    assert fingerprint(few) != fingerprint(many)


def test_of_a_dtensor_a_rank_has_its_shard() -> None:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.empty(16, 6, device="meta")
        shard = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        model = nn.Module()
        model.weight = nn.Parameter(shard)
        adamw = optimizer_state("adamw", model.parameters())
        fake = Fakes().model(model).weight
    assert adamw.bytes_total == 2 * 4 * 6 * FLOAT
    assert isinstance(fake, DTensor)
    assert isinstance(fake, nn.Parameter)
    assert (fake.shape, fake.to_local().shape) == ((16, 6), (4, 6))
    assert isinstance(fake._local_tensor, FakeTensor)
    assert fake.placements == shard.placements
