"""Meshes of data, tensor, pipe and context: what one rank of them holds, and which is fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.api.mesh_search import FUSED, MeshSearch, in_context, kept_bytes, ring_s
from memopt.capture.fake_ranks import fake_ranks
from memopt.distributed.tensor_shares import share_layers
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.mesh import Mesh, in_flight, pipeline_turns
from memopt.models.options import StepOptions
from memopt.models.presets import H100
from memopt.programs.lifetimes import lifetimes
from memopt.report.ladder import MeshRung, Rung, best_mesh, mesh_figures, mesh_table

WIDTH, WORDS, DEPTH, ROWS = 64, 96, 4, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (one(x).unflatten(-1, (-1, 16)) for one in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Language(nn.Module):
    tp_plan: ClassVar = {
        **dict.fromkeys((f"blocks.*.{name}" for name in ("q", "k", "v", "up")), "colwise"),
        **dict.fromkeys((f"blocks.*.{name}" for name in ("o", "down")), "rowwise"),
        "words": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def load(parts: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Language(), torch.zeros(2, ROWS // parts, dtype=torch.int64)


def search(budget: int = 2**30, source: Any = load) -> MeshSearch:
    return MeshSearch(source, H100, budget, "adamw", StepOptions(loss_fn=lambda loss: loss))


def test_shares_of_one_rank_compute_what_the_whole_does() -> None:
    torch.manual_seed(0)
    whole, shared = Language(), Language()
    shared.load_state_dict(whole.state_dict())
    ids = torch.arange(32).view(2, 16)
    with fake_ranks(Mesh(tensor=1)) as devices:
        losses = [model(ids) for model in (whole, share_layers(shared, devices))]
        for loss in losses:
            loss.backward()
    assert torch.equal(*losses)
    for (name, one), other in zip(whole.named_parameters(), shared.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    with fake_ranks(Mesh(tensor=3)) as devices, pytest.raises(ValueError, match="3 ranks do not"):
        share_layers(Language(), devices)
    with fake_ranks(Mesh(tensor=2)) as devices, pytest.raises(ValueError, match="no tp_plan"):
        share_layers(nn.Linear(2, 2), devices)


def test_a_rank_of_data_and_tensor() -> None:
    shared = search().rung(Mesh(data=2, tensor=2)).rung
    assert shared.plan is not None
    assert shared.step_time_s is not None
    sent = [one.collective for one in shared.plan.graph.operators if one.collective]
    sums = [one for one in sent if one.kind is CollectiveKind.ALL_REDUCE]
    # Each product by columns sums its slopes, each one by rows and the table its results.
    assert {(one.ranks, one.stride) for one in sums} == {(2, 1)}
    assert len(sums) == DEPTH * (4 + 2) + 2
    gathers = [one for one in sent if one.kind is CollectiveKind.ALL_GATHER]
    assert (2, 2) in {(one.ranks, one.stride) for one in gathers}
    whole = sum(one.numel() for one in Language().parameters())
    assert shared.trained == pytest.approx(whole / 4, rel=0.05)
    assert shared.samples_per_s == pytest.approx(2 * 2 * ROWS / shared.step_time_s)


def test_a_stage_holds_micro_batches_in_flight() -> None:
    mesh = Mesh(pipe=2, data=1)
    found = search().rung(mesh).rung
    plan = found.plan
    assert plan is not None
    assert found.peak_bytes is not None
    assert found.step_time_s is not None
    of_blocks = [one.module for one in plan.graph.operators if "blocks" in one.module]
    assert {one.split(".")[1] for one in of_blocks} == {"0", "1"}
    kept = kept_bytes(plan.graph, plan.program)
    operators, boundary = plan.graph.operators, plan.program.boundary or 0
    made = {tensor for one in operators if "blocks" in one.module for tensor in one.writes}
    living = [x for x in lifetimes(plan.graph, plan.program).device if x.begin < boundary < x.end]
    of_blocks = sum(plan.graph.tensors[x.tensor].size_bytes for x in living if x.tensor in made)
    # And what the table gives the first block.
    assert kept == of_blocks + 2 * ROWS * WIDTH * 4 > 2 * 4 * 2 * ROWS * WIDTH * 4
    assert found.peak_bytes > plan.peak_bytes + kept
    assert found.step_time_s > pipeline_turns(2, 8) * plan.step_time_s
    assert found.samples_per_s == pytest.approx(8 * 2 * ROWS / found.step_time_s)
    # What does not fit as it is may be recomputed, with fewer bytes in flight.
    budget = found.peak_bytes - kept
    less = search(budget).rung(mesh).rung
    assert less.changes == ("recompute plan",)
    assert less.peak_bytes is not None
    assert less.peak_bytes <= budget
    assert search().rung(Mesh(pipe=8)).why == "its blocks are not one list of more than 8"


def test_a_stage_may_run_its_forward_again() -> None:
    mesh = Mesh(pipe=2, data=1)
    refused = search(1).rung(mesh).rung
    assert not refused.fits
    assert refused.needed_bytes is not None
    least = search(refused.needed_bytes).rung(mesh).rung
    assert least.fits
    assert least.plan is not None
    # Other micro-batches keep the stage's input alone, and what its blocks read of the table.
    plan, row = least.plan, 2 * ROWS * WIDTH * 4
    assert kept_bytes(plan.graph, plan.program) <= row


def test_schedules() -> None:
    assert [in_flight(4, 16, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(4, 2) == 2
    assert in_flight(4, 16, parts=2) == 11
    assert pipeline_turns(4, 16) == 19
    assert pipeline_turns(4, 16, parts=3) == 17


def test_attention_meets_the_keys_of_a_context() -> None:
    alone = search(source=lambda parts: load(4)).rung(Mesh(data=4)).rung.plan
    assert alone is not None
    graph = in_context(alone.graph, 4, 2, H100)
    pairs = zip(alone.graph.operators, graph.operators, strict=True)
    fused = [(one, other) for one, other in pairs if FUSED in one.target]
    assert len(fused) == 2 * DEPTH
    keys = 4 * 2 * 2 * ROWS // 4 * WIDTH * 4
    for one, other in fused:
        back = "backward" in one.target
        assert other.time_s == ring_s(one.time_s, keys, 4, 2, back, H100) >= 4 * one.time_s
        assert other.workspace_bytes == one.workspace_bytes + keys
        # Traced by torch.compile, nothing is sent beside the work.
        waited = ring_s(one.time_s, keys, 4, 2, back, H100, compiled=True)
        sent = Collective(CollectiveKind.ALL_GATHER, 4, keys, 2)
        each = H100.collective_time_s(sent) * (1 + back * 8 / 3)
        assert waited == pytest.approx(4 * one.time_s + each)
    plain = tuple(replace(one, target="") for one in graph.operators)
    with pytest.raises(ValueError, match="no fused attention"):
        in_context(replace(graph, operators=plain), 2, 1, H100)


def test_the_fastest_mesh_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def rung(_: MeshSearch, mesh: Mesh) -> MeshRung:
        fits = mesh.size("tensor") > 1 and mesh.size("pipe") < 4
        rate = 100.0 * mesh.size("pipe") - mesh.size("tensor") - mesh.size("context")
        needed = 1000 // mesh.size("tensor")
        found = Rung((), fits, needed_bytes=needed, samples_per_s=rate * fits, busy={"compute": 1})
        return MeshRung(mesh, found)

    monkeypatch.setattr(MeshSearch, "rung", rung)
    heard: list[MeshRung] = []
    found = search().search(16, True, heard.append)
    assert list(found) == heard
    assert len({one.mesh for one in found}) == len(found)
    best = best_mesh(found)
    assert best is not None
    assert best.mesh == Mesh(pipe=2, data=4, tensor=2)
    assert Mesh(data=8, context=2, tensor=1) not in {one.mesh for one in found}
    (_, first, *_) = mesh_table(found, "tokens/s").splitlines()
    assert first.startswith(str(best.mesh))
    assert "compute 100%" in first
    assert mesh_figures(found)[0]["mesh"] == {"data": 16}
