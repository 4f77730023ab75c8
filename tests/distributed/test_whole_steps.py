"""Whole steps of sharded models: updates, moved shards and state, clipping over the ranks."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of
from tests.distributed import cases, processes
from tests.distributed.test_shard_forms import Net
from tests.whole_steps.test_failing_steps import Fault, FaultAt

LINK = memopt.Device(to_host_bytes_per_s=5e9)
HOST = memopt.Device(to_host_bytes_per_s=5e9, host_update_bytes_per_s=1e12)
LOSS = nn.functional.mse_loss
AT = 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def deep(width: int, depth: int, last: Callable[[], nn.Module] = Net) -> nn.Module:
    """Layers of one size, each of which is gathered by itself, between smaller ones."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 16), last())


def pooled() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.AvgPool1d(4))


class Pair:
    """A sharded model with its planned step, and an engine's loop.

    Args:
        model: shards.
        twin: the same, for the engine.
        rank: seeds the data.
        share: of parameters and optimizer state is the budget; None: unlimited.
        rules: `micro_batches`, `clip_norm`, `norm_type`, `scaler`.
        undo: as of `train_step`.
        options: of `memopt.plan`.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        rank: int,
        share: float | None,
        rules: dict[str, Any],
        undo: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.twin, self.rank, self.rules = model, twin, rank, rules
        self.optimizer, self.eager = (
            torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], 1e-2)
            for one in (model, twin)
        )
        ranks = torch.distributed.get_world_size()
        self.bytes = sum(3 * p.numel() * p.itemsize for p in model.parameters()) // ranks
        self.scaler, self.other = (
            torch.amp.GradScaler("cpu", 2.0**10) if "scaler" in rules else None for _ in range(2)
        )
        ((x, y),) = self.batches(0)[:1]
        self.plan = memopt.plan(
            model,
            x,
            loss_fn=LOSS,
            targets=(y,),
            optimizer=self.optimizer,
            budget=None if share is None else int(self.bytes * share),
            progress=False,
            **{**rules, **({"scaler": self.scaler} if self.scaler else {})},
            **options,
        )
        self.step = self.plan.train_step(model, LOSS, self.optimizer, undo=undo, scaler=self.scaler)

    def batches(self, number: int) -> list[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(1000 * self.rank + number)
        return [
            (torch.randn(4, 16, generator=random), torch.randn(4, 3, generator=random))
            for _ in range(self.rules.get("micro_batches", 1))
        ]

    def planned(self, batches: list[tuple[Tensor, Tensor]]) -> Any:
        """Losses of a planned step, and the norm of its gradients."""
        if len(batches) > 1:
            losses = self.step.accumulate([(x, (y,)) for x, y in batches])
        else:
            losses = self.step(batches[0][0], targets=(batches[0][1],))[None]
        return losses, self.step.gradient_norm

    def engine(self, batches: list[tuple[Tensor, Tensor]]) -> Any:
        """The same of the engine's."""
        losses, norm = [], None
        for number, (x, y) in enumerate(batches, 1):
            if self.rules.get("reduce_once"):
                self.twin.set_requires_gradient_sync(number == len(batches))
            loss = LOSS(self.twin(x), y)
            losses.append(loss.detach())
            loss = loss / len(batches) if len(batches) > 1 else loss
            (self.other.scale(loss) if self.other else loss).backward()
        if self.other is not None:
            self.other.unscale_(self.eager)
        if "clip_norm" in self.rules:
            most, kind = self.rules["clip_norm"], self.rules.get("norm_type", 2.0)
            norm = cases.whole(nn.utils.clip_grad_norm_(self.twin.parameters(), most, kind))
        if self.other is not None:
            self.other.step(self.eager)
            self.other.update()
        else:
            self.eager.step()
        self.eager.zero_grad()
        return torch.stack(losses), norm

    def run(self, first: int, count: int) -> bool:
        """Whether steps of both have the same bits, and leave them."""
        alike = True
        for number in range(first, first + count):
            batches = self.batches(number)
            (losses, norm), (others, other) = self.planned(batches), self.engine(batches)
            alike = alike and torch.equal(losses, others)
            alike = alike and (norm is other or torch.equal(norm, other))
        return alike and cases.same(held(self.model, self.optimizer), held(self.twin, self.eager))

    def peak(self) -> int:
        """Of a planned step."""
        unmetered = self.plan.resident_bytes - backend_of("cpu").step_scalars_bytes
        batches, counters_bytes = self.batches(0), 0
        with metered(torch.device("cpu")) as use:
            # A step replaces the optimizer's counters: a meter sees those go that it has seen come.
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if value.dim() == 0:
                        state[name] = value.clone()
                        counters_bytes += value.nbytes
            self.planned(batches)
        return unmetered + use.peak_bytes - counters_bytes


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and optimizer state, gathered: engines may shard along other dimensions."""
    states = [optimizer.state[p] for p in model.parameters() if p.requires_grad]
    found = [*model.parameters(), *(one for state in states for one in state.values())]
    return [cases.whole(one).detach() for one in found]


MOVED = {"strategy": "offload-graph", "movable": "all", "device": LINK}
WAYS: dict[str, tuple[float | None, dict[str, Any], dict[str, Any]]] = {
    "moved, accumulated, clipped": (0.6, {"micro_batches": 2, "clip_norm": 0.1}, MOVED),
    "stays from step to step": (0.6, {}, {**MOVED, "steady_state": True}),
    "updated on the host": (0.6, {}, {**MOVED, "device": HOST}),
    "scaled": (None, {"scaler": True, "clip_norm": 0.1}, {"strategy": "store-all"}),
    "state on the host": (None, {}, {"strategy": "olla", "offload_optimizer": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_shards_are_updated_as_the_optimizer_does(way: str, alone: Any) -> None:
    share, rules, options = WAYS[way]
    made = Pair(*(memopt.shard(deep(16, 4), alone) for _ in range(2)), 0, share, rules, **options)
    assert made.run(0, 3)
    assert ("device" in options) == (made.plan.host_peak_bytes > 0)
    saved = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))
    assert made.run(3, 1)
    for model, optimizer in ((made.model, made.optimizer), (made.twin, made.eager)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert made.run(4, 2)
    assert made.peak() == pytest.approx(made.plan.peak_bytes, rel=0.01)


@pytest.mark.slow
def test_a_step_that_fails_is_taken_back(alone: Any) -> None:
    made = Pair(*(memopt.shard(deep(16, 2), alone) for _ in range(2)), 0, 0.7, {}, True, **MOVED)
    assert made.run(0, 1)
    before = [one.clone() for one in held(made.model, made.optimizer)]
    taken_back = 0
    for number in range(5, 400, 25):
        with pytest.raises(Fault) if number < 300 else contextlib.suppress(Fault), FaultAt(number):
            made.planned(made.batches(1))
            break
        taken_back += 1
        assert cases.same(held(made.model, made.optimizer), before), number
    assert taken_back > 5
    assert made.run(1, 2)


def on_ranks(
    rank: int,
    ranks: int,
    way: str,
    width: int,
    depth: int,
    steps: int,
    share: float,
    peaks: int = 1,
    file: str = "",
) -> dict[str, Any]:
    """Steps whose shards and state move, beside those of an engine: FSDP2 without accumulation,
    the sharded model's own loop with it. With a file, half of them under the plan that the first
    rank has saved there."""
    mesh = init_device_mesh("cpu", (2, ranks // 2) if way == "replicas" else (ranks,))
    of_fsdp = way in ("as FSDP2", "reduced once")
    # FSDP2 takes no scalars, and lets ranks have no rows.
    last = pooled if of_fsdp else Net
    twin = deep(width, depth, last)
    if of_fsdp:
        for block in (*twin, twin):
            fully_shard(block, mesh=mesh)
    else:
        memopt.shard(twin, mesh)
    rules: dict[str, Any] = {"clip_norm": 0.1}
    if way == "accumulated":
        rules["micro_batches"] = 2
    elif way == "reduced once":
        rules |= {"micro_batches": 3, "reduce_once": True}
    made = Pair(memopt.shard(deep(width, depth, last), mesh), twin, rank, share, rules, **MOVED)
    same = made.run(0, steps)
    if file:
        if rank == 0:
            made.plan.save(file)
        torch.distributed.barrier()
        loaded = memopt.load(file)
        made.step = loaded.train_step(made.model, LOSS, made.optimizer)
        same = same and made.run(steps, steps)
    return {
        "same": same,
        "peaks": (min(made.peak() for _ in range(peaks)), made.plan.peak_bytes, made.plan.budget),
        "host": (made.step._homes.swap.account.peak_bytes, made.plan.host_peak_bytes),
        "share": made.bytes / made.plan.budget,
    }


def check_moved(found: list[dict[str, Any]], share: float, metered: bool = True) -> None:
    for one in found:
        assert one["same"]
        measured, predicted, budget = one["peaks"]
        if metered:
            assert measured <= budget
            assert measured == pytest.approx(predicted, rel=0.01)
        assert 0 < one["host"][0] <= one["host"][1]
        assert one["share"] >= share


def test_two_ranks(tmp_path: Path) -> None:
    file = str(tmp_path / "uneven.plan")
    found = processes.run(on_ranks, 2, tmp_path, "accumulated", 16, 2, 1, 0.9, 1, file)
    # What is metered on a busy machine is gloo's, too.
    check_moved(processes.results(found), 1.1, metered=False)


@pytest.mark.slow
def test_micro_batches_share_one_reduction_on_two_ranks(tmp_path: Path) -> None:
    found = processes.run(on_ranks, 2, tmp_path, "reduced once", 16, 3, 2, 0.9)
    check_moved(processes.results(found), 1.1, metered=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["accumulated", "as FSDP2", "reduced once", "replicas"])
def test_four_times_the_budget_of_four_ranks(way: str, tmp_path: Path) -> None:
    """Twenty steps of a model of which a rank's part, with its state, is four times its budget."""
    found = processes.run(on_ranks, 4, tmp_path, way, 32, 36, 20, 0.25, 3, timeout_s=900)
    check_moved(processes.results(found), 4.0)


FAULTS = {"fault": Fault, "memory": torch.OutOfMemoryError, "ctrl-c": KeyboardInterrupt}
LATE_S = 5.0


def failing_on_one(rank: int, ranks: int, way: str, undo: bool) -> tuple[str, str, bool, float]:
    """The last rank fails in a step; what each is told there and in the next step, whether all
    is as before, and after how many seconds."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=300))
    mesh = DeviceMesh.from_group(group, "cpu")
    twin = nn.Sequential(nn.Linear(1, 1))
    made = Pair(memopt.shard(deep(16, 2, pooled), mesh), twin, rank, 0.9, {}, undo, **MOVED)
    made.planned(made.batches(0))
    before = [cases.local(one).clone() for one in tensors(made.model, made.optimizer)]
    torch.distributed.barrier()
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=LATE_S), group)
    fails, batches = rank == ranks - 1, made.batches(1)
    if fails and way == "another batch":
        batches = [(x[:2], y[:2]) for x, y in batches]
    at: Any = FaultAt(120, FAULTS[way]) if fails and way in FAULTS else contextlib.nullcontext()
    if fails and way == "at the end":
        at = mock.patch("memopt.executor.train_step.pass_on", side_effect=Fault("late"))
    words, begin = [], time.monotonic()
    for number in (1, 2):
        try:
            with at if number == 1 else contextlib.nullcontext():
                made.planned(batches if number == 1 else made.batches(2))
            words.append("")
        except BaseException as error:  # noqa: BLE001 (told to the test)
            words.append(f"{type(error).__name__}: {error}")
        if number == 1:
            seconds = time.monotonic() - begin
            now = [cases.local(one).clone() for one in tensors(made.model, made.optimizer)]
    return words[0], words[1], cases.same(before, now), seconds


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and optimizer state."""
    states = [optimizer.state[p] for p in model.parameters()]
    return [*model.parameters(), *(one for state in states for one in state.values())]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", [*FAULTS, "another batch", "at the end"])
def test_one_rank_fails(way: str, ranks: int, tmp_path: Path) -> None:
    work = processes.run(failing_on_one, ranks, tmp_path, way, True, timeout_s=30)
    *others, own = processes.results(work)
    assert own[2]  # as before
    if way == "at the end":
        assert "not in step any more" in own[1]
        for first, second, _, _ in others:
            assert (first, "This rank had done that step" in second) == ("", True), second
        return
    for first, second, unchanged, seconds in others:
        kind = FAULTS[way].__name__ if way in FAULTS else "refused its call"
        assert first.startswith(f"RankError: rank {ranks - 1} "), first
        assert kind in first
        assert "The step is over on every rank" in first
        assert first.removesuffix(".") in second
        assert unchanged
        assert seconds < 2 * LATE_S
    assert "not in step any more" in own[1] or "other ranks did not refuse" in own[1]


def evaluating(rank: int, ranks: int, together: bool) -> tuple[str, list[float], float]:
    """Ranks, or the last one alone, evaluate the model between its whole steps."""
    model = memopt.shard(cases.mlp(), init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    given, text, losses, begin_s = torch.randn(64, 16), "", list[float](), 0.0

    def loss_fn(out: Tensor) -> Tensor:
        return out.square().mean()

    named: dict[str, Any] = {"optimizer": optimizer, "loss_fn": loss_fn, "progress": False}
    plan = memopt.plan(model, given, budget="min", strategy="store-all", **named)
    step = plan.train_step(model, loss_fn, optimizer)
    try:
        for number in range(5):
            begin_s = time.monotonic() if number <= AT else begin_s
            if number == AT and (together or rank == ranks - 1):
                with torch.no_grad():
                    losses += [loss_fn(model(given)).item() for _ in range(2)]
            losses.append(step(given).item())
    except memopt.RankError as error:
        text = f"{type(error).__name__}: {error}"
    return text, losses, time.monotonic() - begin_s


@pytest.mark.slow
def test_ranks_evaluate_between_whole_steps(tmp_path: Path) -> None:
    for told, losses, _ in processes.results(processes.run(evaluating, 2, tmp_path, True)):
        assert not told
        assert losses[AT] == losses[AT + 1] < losses[AT - 1]


@pytest.mark.slow
def test_one_rank_evaluates_between_whole_steps(tmp_path: Path) -> None:
    run = processes.run(evaluating, 2, tmp_path, False, timeout_s=15)
    (told, _, took_s), (own, _, own_s) = processes.results(run)
    assert told == own
    assert "rank 1 waited while a model runs outside of its whole steps; rank 0 waited" in told
    assert max(took_s, own_s) < 20
