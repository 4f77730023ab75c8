"""Plans with torch's own engines: FSDP2 around what is planned, tensor parallelism inside it."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.errors import CaptureError
from memopt.pricing.memory import MemoryUse, metered
from tests.distributed import cases, processes


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def engines(rank: int, ranks: int) -> dict[str, Any]:
    """Three steps of each kind, planned; whether they are those of the unplanned engine."""
    mesh = init_device_mesh("cpu", (ranks,))
    unplanned = cases.mlp()
    for block in unplanned:
        fully_shard(block, mesh=mesh)
    fully_shard(unplanned, mesh=mesh)
    losses = cases.train(unplanned, unplanned, rank, 3)
    found: dict[str, Any] = {}

    with pytest.raises(CaptureError) as refused:
        memopt.plan(unplanned, cases.batch(unplanned), progress=False)
    found["refusal"] = str(refused.value)

    model = cases.mlp()
    plan = memopt.plan(model, cases.batch(model), budget="min", progress=False)
    around: Any = plan.apply(model)
    fully_shard(around, mesh=mesh)
    found["root"] = cases.train(around, model, rank, 3) == losses
    found["root calls"] = around.calls.planned

    model = cases.mlp()
    features = cases.batch(model)["input"]
    for i, block in enumerate(model):
        features.requires_grad_(i > 0)
        made = memopt.plan(block, features, budget="min", progress=False)
        model[i] = made.apply(block)
        fully_shard(model[i], mesh=mesh)
    blocks: list[Any] = list(model)
    fully_shard(model, mesh=mesh)
    found["blocks"] = cases.train(model, model, rank, 3) == losses
    found["block calls"] = [block.calls.planned for block in blocks]

    ends = []
    for planned in (False, True):
        torch.manual_seed(0)
        parallel = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if planned:
            memopt.wrap(parallel, "min", progress=False)
        # Every rank of a tensor-parallel group has the same data.
        ends.append((cases.train(parallel, parallel, 0, 3), cases.own(parallel)))
    found["tensor parallel"] = ends[0][0] == ends[1][0] and cases.same(ends[0][1], ends[1][1])
    (parallel_plan,) = parallel.memopt.plans
    found["collectives"] = sum(
        "all_reduce" in operator.target for operator in parallel_plan.graph.operators
    )
    return found


@pytest.mark.slow
def test_engines(tmp_path: Path) -> None:
    for one in processes.results(processes.run(engines, 2, tmp_path)):
        assert "memopt.shard(model, mesh)" in one["refusal"]
        assert one["root"]
        assert one["root calls"] == 3
        assert one["blocks"]
        assert one["block calls"] == [3, 3, 3, 3]
        assert one["tensor parallel"]
        assert one["collectives"] > 0


def test_gradients_that_fully_shard_accumulates_are_counted(alone: DeviceMesh) -> None:
    """Blocks that are planned one by one show theirs while they are gathered."""
    model, x = cases.mlp(), torch.randn(8, 16)
    for block in (*model[:3], model):
        fully_shard(block, mesh=alone)
    memopt.wrap(model, "min", "store-all", progress=False)
    for number in range(6):
        model.zero_grad()
        meter = metered(torch.device("cpu")) if number == 5 else contextlib.nullcontext(MemoryUse())
        with meter as used:
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(x).square().mean().backward()
    own_bytes = sum(one.nbytes for one in cases.own(model))
    predicted = memopt.running(model).parts.shared.peak_bytes()
    # A meter does not see that gradients from before its step go, while their shards come.
    assert 0 <= predicted - (x.nbytes + own_bytes + used.peak_bytes) < own_bytes


def test_evaluation_of_sharded_blocks_gathers_them(alone: DeviceMesh) -> None:
    """Before the first step, between steps, and without gradients in training mode."""
    found, x = [], torch.randn(8, 16)
    for planned in (False, True):
        model = cases.mlp()
        for block in (*model[:3], model):
            fully_shard(block, mesh=alone)
        if planned:
            memopt.wrap(model, "min", "rotor", progress=False)
        outputs = []
        for step in range(3):
            model.train(step == 1)
            with torch.no_grad():
                outputs.append(model(x))
            model.train()
            model(x).square().mean().backward()
        found.append([*outputs, *(cases.local(one.grad) for one in model.parameters())])
    assert cases.same(*found)


def test_blocks_of_a_model_that_keeps_keys(alone: DeviceMesh) -> None:
    """A block would add its keys to the cache that it is called with."""
    found = []
    for planned in (False, True):
        model: Any = cases.gpt2()
        model.transformer.h = model.transformer.h[:1]
        for block in (*model.transformer.h, model):
            fully_shard(block, mesh=alone)
        if planned:
            memopt.wrap(model, "min", "rotor", progress=False)
        found.append((cases.train(model, model, 0, 2), cases.own(model)))
    assert found[0][0] == found[1][0]
    assert cases.same(found[0][1], found[1][1])
    assert memopt.running(model).calls.planned == 2


def test_a_checkpointed_block_that_is_sharded(alone: DeviceMesh) -> None:
    """torch's checkpoint_wrapper, then fully_shard: the engine's hooks are on in the backward."""
    found, x = [], torch.randn(8, 4)
    for planned in (False, True):
        torch.manual_seed(0)
        block = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1)))
        model = fully_shard(nn.Sequential(fully_shard(block, mesh=alone)), mesh=alone)
        if planned:
            memopt.wrap(model, "min", "rotor", progress=False)
        for _ in range(2):
            model(x).square().mean().backward()
        found.append([cases.local(one.grad) for one in model.parameters()])
    assert cases.same(*found)


def test_a_block_that_cannot_be_captured_says_why(alone: DeviceMesh) -> None:
    class Reads(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * math.erf(input.max().item())

    found, x = [], torch.randn(2, 4)
    for way in ("", "whole", "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Reads(4, 4))
        for block in (*model, model):
            fully_shard(block, mesh=alone)
        if way:
            parts = way if way == "auto" else None
            memopt.wrap(model, "min", parts=parts, progress=False)
        if way == "whole":
            with pytest.raises(
                CaptureError, match=r"item\(\).*parts=\"auto\"\) plans what is inside"
            ):
                model(x)
            continue
        for _ in range(2):
            model(x).square().mean().backward()
        found.append([cases.local(one.grad).clone() for one in model.parameters()])
    assert cases.same(*found)


def test_buckets_beside_gradients_that_are_no_views_of_them(alone: DeviceMesh) -> None:
    """`no_sync` makes such gradients after `zero_grad()`, though DDP makes views of its buckets."""
    model, x = cases.mlp(), torch.randn(8, 16)
    memopt.wrap(model, "min", "store-all", progress=False)
    around = DistributedDataParallel(model, gradient_as_bucket_view=True)
    charged = []
    for _ in range(2):
        for last in (False, True):
            with contextlib.nullcontext() if last else around.no_sync():
                around(x).square().mean().backward()
            charged.append(memopt.running(model).around.certain().bucket_bytes)
        model.zero_grad(set_to_none=False)
    own_bytes = sum(one.nbytes for one in cases.own(model))
    assert charged == [own_bytes, own_bytes, 0, 0]


def padded_on_one(rank: int, ranks: int) -> bool:
    """Whether a model that rounds by its mask trains as without memopt, but for last bits."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

    from transformers import LlamaConfig, LlamaForCausalLM  # isort: skip

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = memopt.shard(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train(), line(ranks))
        if planned:
            memopt.wrap(model, "min", "rotor", progress=False)
        for padded in (rank == 1, True, False):
            texts = torch.arange(24).view(2, 12) + rank
            mask = torch.ones_like(texts)
            mask[0, 8:] = not padded
            model(input_ids=texts, attention_mask=mask, labels=texts).loss.backward()
        found.append([cases.local(one.grad) for one in model.parameters()])
    return all(map(torch.allclose, *found))


def line(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


@pytest.mark.slow
def test_ranks_capture_alike_where_one_has_padding(tmp_path: Path) -> None:
    assert processes.results(processes.run(padded_on_one, 2, tmp_path)) == [True, True]


def test_the_state_of_an_optimizer_of_shards_is_charged(alone: DeviceMesh) -> None:
    """In the forward of a model that is sharded whole other parameters are there than it trains."""
    found = []
    for planned in (False, True):
        model = fully_shard(cases.mlp(), mesh=alone)
        optimizer = torch.optim.AdamW(model.parameters())
        if planned:
            memopt.wrap(model, "min", "rotor", optimizer=optimizer, progress=False)
        for _ in range(2):
            model(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(cases.own(model))
    assert cases.same(*found)
    (plan,) = memopt.running(model).plans
    assert plan.profiled.optimizer.bytes_total == 2 * sum(x.nbytes + 2 for x in found[0])


@pytest.mark.usefixtures("alone")
def test_flat_parameters_are_charged() -> None:
    """FullyShardedDataParallel around a wrapped model holds flat gradients beside its own."""
    inner, x = memopt.wrap(cases.mlp(), "min", "store-all", progress=False), torch.randn(8, 16)
    whole = sum(one.nbytes for one in inner.parameters())
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(inner, device_id=cpu, use_orig_params=True)
    charged = []
    for last in (False, True):
        with contextlib.nullcontext() if last else model.no_sync():
            model(x).square().mean().backward()
        charged.append(memopt.running(inner).around.certain().bucket_bytes - whole)
    assert 0 <= charged[0] < 64 * 8  # each parameter's place is aligned
    assert charged[1] - 2 * charged[0] == whole
    assert memopt.running(inner).calls.planned == 2


@pytest.mark.usefixtures("alone")
def test_flat_parameters_of_blocks_are_refused() -> None:
    model = cases.mlp()
    model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"0 is a FullyShardedDataParallel.*take fully_shard"):
        memopt.wrap(model, "min", parts="auto", progress=False)
    memopt.wrap(model, "min", progress=False)
    with pytest.raises(CaptureError, match="FullyShardedDataParallel: take fully_shard"):
        model(torch.randn(8, 16))


class Reading(nn.Sequential):
    """Blocks around a line that reads a value."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = self[0](input)
        return super().forward(input * (1 + (input.sum().item() > 1e9)))


@pytest.mark.parametrize("shard", [fully_shard, memopt.shard])
@pytest.mark.filterwarnings("ignore:.*can.* be captured as one graph")
def test_a_sharded_model_in_parts(shard: Any, alone: DeviceMesh) -> None:
    found, x = [], torch.randn(8, 16)
    for planned in (False, True):
        model = shard(Reading(*(cases.mlp()[0] for _ in range(3))), mesh=alone)
        if planned:
            memopt.wrap(model, "min", "rotor", parts="auto", progress=False)
        for number in range(6):
            model.zero_grad()
            meter = metered(torch.device("cpu")) if number == 5 else contextlib.nullcontext()
            with meter as used:
                model(x).square().mean().backward()
        found.append([cases.local(one.grad) for one in model.parameters()])
    assert cases.same(*found)
    assert memopt.running(model).calls.planned == 4 * 6
    own_bytes = sum(one.nbytes for one in cases.own(model))
    assert memopt.running(model).parts.shared.peak_bytes() == own_bytes + x.nbytes + used.peak_bytes
