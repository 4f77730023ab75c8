"""Forms of sharding: replicas of shards, lower precision, tied, frozen and scalar parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.checkpoint import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import memopt
from memopt.step.shards import holders_of
from tests.distributed import cases, processes


class Net(nn.Module):
    """Tied, frozen, scalar and uneven parameters; one row fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 7)
        self.frozen = nn.Linear(7, 16)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(16, 7)
        self.last.weight = self.first.weight
        self.few = nn.Parameter(torch.randn(3, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.frozen(self.first(input).relu())
        return (self.last(hidden) * self.scale) @ self.few.t()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def gradients(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Of one step on this rank's data, whole."""
    torch.manual_seed(10 + rank)
    model(torch.randn(8, 16)).square().mean().backward()
    named = model.named_parameters()
    return {name: cases.whole(p.grad) for name, p in named if p.grad is not None}


class StackedExperts(nn.Module):
    """Two experts, whose weights are stacked, and a mixture of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 2)
        self.up = nn.Parameter(torch.randn(2, 16, 24) / 4)
        self.down = nn.Parameter(torch.randn(2, 24, 16) / 4)

    def forward(self, input: Tensor) -> Tensor:
        shares = self.router(input).softmax(-1)
        hidden = torch.einsum("ti,eio->eto", input, self.up).relu()
        return torch.einsum("eto,eoi,te->ti", hidden, self.down, shares)


def last_of_stacked(parameter: nn.Parameter) -> Shard:
    """Shards stacked weights along their last dimension."""
    return Shard(2 if parameter.dim() == 3 else 0)


def stacked(rank: int, ranks: int) -> dict[str, Any]:
    """Five steps of stacked experts, sharded in each way, beside FSDP2's."""
    mesh, found = init_device_mesh("cpu", (ranks,)), {}
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    for way, place in (("last", last_of_stacked), ("chosen", None)):
        # Two rows are enough for two ranks.
        evenly = place or (lambda one: Shard(int(one.dim() > 1 and ranks > 2)))
        theirs = fully_shard(StackedExperts(), mesh=mesh, shard_placement_fn=evenly)
        expected = trained_on(theirs, rank), cases.own(theirs)
        for planned in (False, True):
            ours = memopt.shard(StackedExperts(), mesh, shard_placement_fn=place)
            if planned:
                memopt.wrap(ours, "min", progress=False)
            losses = trained_on(ours, rank)
            if ranks > 2 and not planned:
                # gloo adds few numbers of several ranks in another order; plans join collectives.
                found[f"{way} {planned}"] = losses == pytest.approx(expected[0], rel=1e-4)
                continue
            same = losses == expected[0]
            found[f"{way} {planned}"] = same and cases.same(cases.own(ours), expected[1])
        found[f"{way} bytes"] = sum(one.nbytes for one in cases.own(ours)[:2])
    ends = []
    for planned in (False, True):
        ours = memopt.shard(StackedExperts(), square, shard_placement_fn=last_of_stacked)
        if planned:
            memopt.wrap(ours, "min", progress=False)
        ends.append((trained_on(ours, rank), cases.own(ours)))
    found["replicas"] = ends[0][0] == ends[1][0] and cases.same(ends[0][1], ends[1][1])
    return found


def trained_on(model: Any, rank: int) -> list[float]:
    """Losses of five steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(100 + rank)
    found = []
    for _ in range(5):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), cases.whole(norm).item()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_stacked_experts_are_shared_evenly(ranks: int, tmp_path: Path) -> None:
    for one in processes.results(processes.run(stacked, ranks, tmp_path)):
        whole = 4 * 2 * (2 * 16 * 24)
        assert (one.pop("last bytes"), one.pop("chosen bytes")) == (whole // ranks, whole // ranks)
        assert all(one.values()), one


def forms(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Gradients of each form beside averaged ones of the whole model, and checkpoints."""
    found: dict[str, Any] = {}
    expected = gradients(Net(), rank)
    for value in expected.values():
        torch.distributed.all_reduce(value)
        value /= ranks
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    for name, mesh in (("shards", line), ("replicas", square)):
        for planned in (False, True):
            model = memopt.shard(Net(), mesh)
            if planned:
                memopt.wrap(model, "min", progress=False)
            got = gradients(model, rank)
            assert got.keys() == expected.keys()
            for key, value in got.items():
                torch.testing.assert_close(value, expected[key])
            found[f"{name} {planned}"] = [cases.own(model), [*got.values()]]

    lower = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours = memopt.wrap(memopt.shard(cases.mlp(), line, **lower), "min", progress=False)
    theirs = cases.mlp()
    for block in (*theirs, theirs):
        fully_shard(block, mesh=line, mp_policy=MixedPrecisionPolicy(**lower))
    pair = [cases.train(model, model, rank, 3) for model in (ours, theirs)]
    found["bfloat16"] = pair[0] == pair[1] and cases.same(cases.own(ours), cases.own(theirs))
    found["float32 shards"] = all(p.dtype is torch.float32 for p in ours.parameters())

    # A checkpoint of ours, read by FSDP2.
    save_checkpoint({"model": ours.state_dict()}, checkpoint_id=folder)
    state = {"model": {k: torch.zeros_like(v) for k, v in theirs.state_dict().items()}}
    load_checkpoint(state, checkpoint_id=folder)
    theirs.load_state_dict(state["model"])
    found["checkpoint"] = cases.same(cases.own(ours), cases.own(theirs))
    return found


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for one in processes.results(processes.run(forms, 4, tmp_path, str(folder))):
        for name in ("shards", "replicas"):
            (values, grads), (planned_values, planned_grads) = (
                one[f"{name} {planned}"] for planned in (False, True)
            )
            assert cases.same(values, planned_values)
            assert cases.same(grads, planned_grads)
        assert one["bfloat16"]
        assert one["float32 shards"]
        assert one["checkpoint"]


@pytest.fixture
def eight_fake_ranks() -> Iterator[Any]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    torch.distributed.destroy_process_group()


def sent(plan: memopt.Plan, what: str) -> list[list[int]]:
    """Bytes of each collective's results."""
    tensors, operators = plan.graph.tensors, plan.graph.operators
    return [[tensors[t].size_bytes for t in x.writes] for x in operators if what in x.target]


def test_what_is_gathered_in_which_precision(eight_fake_ranks: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
    memopt.shard(model, eight_fake_ranks, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = memopt.plan(model, torch.randn(4, 16), progress=False)
    # Whole parameters of two bytes, and an eighth of the gradients of four, packed.
    assert sent(plan, "all_gather") == [[2 * 16 * 24, 2 * 24], [2 * 24 * 8, 2 * 8]]
    assert sent(plan, "reduce_scatter") == [[4 * (24 + 1)], [4 * (48 + 3)]]
    shards = {one.name: one.size_bytes for one in plan.graph.tensors if one.resident}
    assert shards["0.weight"] == 4 * 16 * 24 // 8


def test_what_leaves_ranks_without_rows_is_sharded_along_another_dimension(
    eight_fake_ranks: Any,
) -> None:
    def shards(**options: Any) -> dict[str, tuple[int, ...]]:
        model = memopt.shard(StackedExperts(), eight_fake_ranks, **options)
        named = model.named_parameters()
        return {name: tuple(p.to_local().shape) for name, p in named if "router" not in name}

    assert shards() == {"up": (2, 2, 24), "down": (2, 3, 16)}
    assert shards(shard_placement_fn=last_of_stacked) == {"up": (2, 16, 3), "down": (2, 24, 2)}
    first = shards(shard_placement_fn=lambda one: Shard(-one.dim()))
    assert first == {"up": (1, 16, 24), "down": (1, 24, 16)}
    model = memopt.shard(StackedExperts(), eight_fake_ranks)
    plan = memopt.plan(model, torch.randn(4, 16), progress=False)
    sizes = {one.name: one.size_bytes for one in plan.graph.tensors if one.resident}
    assert (sizes["up"], sizes["down"]) == (4 * 2 * 16 * 24 // 8, 4 * 2 * 16 * 24 // 8)
    assert sum(sizes for sizes in sent(plan, "reduce_scatter")[0]) >= 2 * 4 * 2 * 16 * 24 // 8
    for wrong, why in (
        (lambda one: Shard(one.dim() - 1), r"router\.weight along dimension 1|of size 2|divide"),
        (lambda one: Shard(5), "return torch.distributed.tensor.Shard"),
        (lambda one: one, "or None for memopt's choice"),
    ):
        model = StackedExperts()
        model.router = nn.Linear(6, 2)
        with pytest.raises(ValueError, match=why):
            memopt.shard(model, eight_fake_ranks, shard_placement_fn=wrong)


def test_small_parameters_of_a_block_are_gathered_together(eight_fake_ranks: Any) -> None:
    def block() -> nn.Module:
        made = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        made[2].bias.requires_grad_(False)
        return made

    def gathered(bucket_bytes: int) -> tuple[list[list[int]], list[list[int]]]:
        model = nn.Sequential(block(), block(), nn.LayerNorm(16))
        memopt.shard(model, eight_fake_ranks, bucket_bytes=bucket_bytes)
        plan = memopt.plan(model, torch.randn(4, 16), progress=False)
        return sent(plan, "all_gather"), sent(plan, "reduce_scatter")

    weight, wide, narrow = 4 * 16 * 24, 4 * 24, 4 * 16
    apart = [[weight], [wide], [weight], [narrow]]
    norm = [[narrow], [narrow]]
    assert gathered(0)[0] == [*apart, *apart, *norm]
    # Two weights do not fit; what is small goes with the first.
    part = [[weight, wide, narrow], [weight]]
    assert gathered(weight + wide + narrow)[0] == [*part, *part, [narrow, narrow]]
    gathers, scatters = gathered(2**20)
    whole = [weight, wide, weight, narrow]
    assert gathers == [whole, whole, [narrow, narrow]]
    # Without the gradient of the frozen bias.
    trained = (2 * weight + wide) // 8
    assert scatters == [[2 * narrow // 8], [trained], [trained]]


class Twice(nn.Module):
    """One block, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU())])

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.blocks[0](self.blocks[0](input))
        return found


def test_a_block_that_is_called_twice_is_gathered_twice(eight_fake_ranks: Any) -> None:
    plan = memopt.plan(memopt.shard(Twice(), eight_fake_ranks), torch.randn(4, 16), progress=False)
    weight, bias = 4 * 16 * 16, 4 * 16
    assert sent(plan, "all_gather") == [[weight, bias]] * 2
    assert sent(plan, "reduce_scatter") == [[(weight + bias) // 8]] * 2


def test_replicas_reduce_what_was_scattered_together(eight_fake_ranks: Any) -> None:
    assert eight_fake_ranks.size() == 8
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
    plan = memopt.plan(
        memopt.shard(nn.Sequential(nn.Linear(16, 24)), mesh), torch.randn(4, 16), progress=False
    )
    part = 4 * (16 * 24 + 24) // 4
    assert sent(plan, "reduce_scatter") == [[part]]
    assert sent(plan, "all_reduce") == [[part]]
    sizes = [plan.graph.tensors[t].size_bytes for t in plan.graph.gradients]
    assert part in sizes


class Summing(nn.Module):
    """Adds over the ranks in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))

    def forward(self, input: Tensor) -> Tensor:
        group = torch.distributed.group.WORLD
        hidden = all_reduce(self.layers[0](input), "sum", group)
        found: Tensor = self.layers[1](hidden)
        return found


def test_micro_batches_share_one_reduction(eight_fake_ranks: Any) -> None:
    def plan(model: nn.Module = Summing(), **rules: Any) -> memopt.Plan:  # noqa: B008
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given: Any = {
            "loss_fn": nn.functional.mse_loss,
            "targets": (torch.randn(4, 3),),
            "optimizer": optimizer,
        }
        given |= {"strategy": "store-all", "whole_step": True, "progress": False}
        return memopt.plan(model, torch.randn(4, 16), **given, **rules)

    model = memopt.shard(Summing(), eight_fake_ranks)
    each, once = (plan(model, micro_batches=3, reduce_once=once) for once in (False, True))
    assert sent(each, "reduce_scatter") == 3 * sent(once, "reduce_scatter")
    for what in ("all_gather", "all_reduce"):  # the model's own is the model's
        assert sent(each, what) == sent(once, what)
        assert len(sent(once, what)) == 6
    with pytest.raises(ValueError, match=r"over ranks: shard it first"):
        plan(micro_batches=3, reduce_once=True)
    with pytest.raises(ValueError, match=r"is for several micro_batches=, got 1: leave it out"):
        plan(model, reduce_once=True)


def test_outside_of_a_step_a_parameter_is_its_shard(eight_fake_ranks: Any) -> None:
    model = memopt.shard(nn.Sequential(nn.Linear(16, 24)), eight_fake_ranks)
    assert model[0].weight is model[0]._parameters["weight"]
    assert model[0].weight.to_local().shape == (3, 16)
    assert model(torch.randn(2, 16)).shape == (2, 24)
    assert [*model.state_dict()] == ["0.weight", "0.bias"]


def test_refusals(eight_fake_ranks: Any) -> None:
    mesh = eight_fake_ranks
    model = memopt.shard(nn.Sequential(nn.Linear(16, 24)), mesh)
    with pytest.raises(ValueError, match="sharded already; shard the outermost module"):
        memopt.shard(model, mesh)
    with pytest.raises(ValueError, match="module '0' is an LSTM, which holds its parameters"):
        memopt.shard(nn.Sequential(nn.LSTM(4, 4)), mesh)
    wrapped = memopt.wrap(nn.Sequential(nn.Linear(4, 4)), progress=False)
    with pytest.raises(ValueError, match="wrapped already: shard first"):
        memopt.shard(wrapped, mesh)
    with pytest.raises(ValueError, match="bucket_bytes must be at least 0, got -1"):
        memopt.shard(nn.Linear(4, 4), mesh, bucket_bytes=-1)
    with pytest.raises(ValueError, match="a DeviceMesh of one dimension, or of two"):
        memopt.shard(nn.Linear(4, 4), None)  # type: ignore[arg-type]
    model = fully_shard(nn.Sequential(nn.Linear(16, 24)), mesh=mesh)
    with pytest.raises(ValueError, match=r"not of those that fully_shard, .*: call memopt\.shard"):
        memopt.plan(
            model,
            torch.randn(2, 16),
            loss_fn=lambda output: output.mean(),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            whole_step=True,
            progress=False,
        )


def test_who_holds_parts_of_a_model(eight_fake_ranks: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
    assert holders_of(memopt.shard(nn.Linear(8, 8), eight_fake_ranks)) == tuple(range(8))
    assert holders_of(memopt.shard(nn.Linear(8, 8), mesh)) == (0, 1, 2, 3)
    assert holders_of(nn.Linear(8, 8)) == ()


def test_gradients_that_are_whole_where_their_parameters_are_cut_are_charged(
    eight_fake_ranks: Any,
) -> None:
    """The eight parts of a table of words have whole gradients each."""
    words = RowwiseParallel(input_layouts=Replicate())
    model = parallelize_module(
        nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 4)), eight_fake_ranks, {"0": words}
    )
    ids, record = torch.randint(0, 64, (2, 8)), []
    for accumulate in (False, True):
        plan = memopt.plan(model, ids, accumulate=accumulate, progress=False)
        record.append(plan.record.accumulated_bytes)
    model(ids).sum().backward()
    grads = [cases.local(one.grad) for one in model.parameters() if one.grad is not None]
    assert record == [0, sum(one.nbytes for one in grads)]
    assert record[1] == 4 * (64 * 16 + 16 * 4 + 4)
