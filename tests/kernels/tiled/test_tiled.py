"""Steps with tiled kernels beside eager steps: their bits, their bounds and their memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.kernels.tiled.kernel import MULTIPLE, chunks_of
from memopt.profiler.adapters import adapted


class Block(nn.Module):
    """Attention and a gated MLP, with an RMS norm (Llama), or a plain MLP and layer norms (GPT)."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        made = nn.RMSNorm if gated else nn.LayerNorm
        self.norms = nn.ModuleList(made(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=not gated)
        self.out = nn.Linear(width, width, bias=not gated)
        self.up = nn.Linear(width, 3 * width, bias=not gated)
        self.gate = nn.Linear(width, 3 * width, bias=False) if gated else nn.Identity()
        self.down = nn.Linear(3 * width, width, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(width, -1)
        q, k, v = (one.view(batch, length, 2, -1).transpose(1, 2) for one in parts)
        if self.gated:
            q, k = turned(q), turned(k)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        inner = F.silu(self.gate(y)) * self.up(y) if self.gated else F.gelu(self.up(y))
        return x + self.down(inner)


def turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2])[:, None] * torch.arange(1, 1 + x.shape[3])
    one, other = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-other, one), -1) * angles.sin()


class Language(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, gated: bool, layers: int = 2, width: int = 16, words: int = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, gated) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(ids)))
        following = F.pad(ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


class Images(nn.Module):
    """Convolutions, and a head whose rows are few images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
            nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, *inputs: Tensor, **asked: Any) -> memopt.Plan:
    asked = {"strategy": "store-all", "kernels": "tiled", **asked}
    return memopt.plan(model, inputs, progress=False, **asked)


def fused(plan: memopt.Plan) -> list[Any]:
    assert plan.graph is not None
    return [one for one in plan.graph.operators if one.target.startswith("memopt.fused.")]


def compare(model: nn.Module, plan: memopt.Plan, *inputs: Tensor) -> dict[str, float]:
    """Return the relative differences of a planned step's gradients; its loss is eager's."""
    twin = copy.deepcopy(model)
    loss, other = plan.apply(model)(*inputs), twin(*inputs)
    assert torch.equal(loss, other)
    loss.backward()
    other.backward()
    found = {}
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None and two.grad is not None:
            found[name] = float((one.grad - two.grad).norm() / two.grad.norm())
    return found


@pytest.mark.parametrize(
    ("gated", "batch", "length"),
    [(True, 1, 200), (False, 3, 70), (True, 6, 40)],
    ids=["llama-one", "gpt-parts", "llama-several"],
)
def test_the_loss_is_eagers_and_so_is_what_no_sum_over_chunks_made(
    gated: bool, batch: int, length: int
) -> None:
    model, ids = Language(gated), ids_of(batch, length)
    plan = planned(model, ids)
    assert len(fused(plan)) >= 8
    found = compare(model, plan, ids)
    assert found.pop("embedding.weight") == 0.0
    assert max(found.values()) < 1e-6


def test_adapters_beside_frozen_weights() -> None:
    model, ids = adapted(Language(True), 4, inside=["blocks"]), ids_of(2, 64)
    plan = planned(model, ids, strategy="rotor", budget="min")
    assert len(fused(plan)) >= 8
    found = compare(model, plan, ids)
    assert len(found) == 2 * 2 * 5
    assert max(found.values()) < 1e-6


def test_nothing_is_tiled_of_convolutions() -> None:
    model, images = Images(), torch.randn(4, 3, 8, 8)
    plan = planned(model, images)
    assert not fused(plan)
    assert "nothing is tiled" in str(plan)
    assert not any(compare(model, plan, images).values())


def test_the_peak_is_the_predicted_one_and_does_not_hold_a_gated_mlp() -> None:
    model, ids = Language(True, layers=1, words=400), ids_of(1, 512)
    plan = planned(model, ids)
    whole = planned(model, ids, kernels="aten")
    wide = 512 * 3 * 16 * 4
    assert plan.peak_bytes < whole.peak_bytes - 4 * wide - 512 * 400 * 4
    report = plan.check(model)
    assert report.measured_peak_bytes <= plan.peak_bytes
    assert report.measured_peak_bytes >= 0.98 * plan.peak_bytes


def test_a_saved_plan_has_the_same_kernels(tmp_path: Any) -> None:
    model, ids = Language(False, layers=1), ids_of(1, 128)
    planned(model, ids).save(tmp_path / "plan.json")
    again = memopt.load(tmp_path / "plan.json")
    assert max(compare(model, again, ids).values()) < 1e-6


def test_a_whole_step_trains_with_tiled_kernels() -> None:
    model, ids = Language(True, layers=1), ids_of(1, 96)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    plan = planned(model, ids, optimizer=optimizer, loss_fn=torch.neg, whole_step=True)
    step = plan.train_step(model, torch.neg, optimizer)
    for _ in range(2):
        loss = -twin(ids)
        torch.testing.assert_close(step(ids), loss.detach())
        other.zero_grad()
        loss.backward()
        other.step()


def test_chunks_cover_every_token_once_and_none_is_short() -> None:
    for counts in [(1, 7), (1, 100), (3, 100), (5, 16), (2, 33)]:
        for rows in (MULTIPLE, 3 * MULTIPLE, 1000):
            chunks = chunks_of(counts, rows)
            seen = [
                (sequence, token)
                for one in chunks
                for sequence in range(one.first, one.last)
                for token in range(one.start, one.stop)
            ]
            assert seen == [(a, b) for a in range(counts[0]) for b in range(counts[1])]
            assert all(one.size("rows") >= min(MULTIPLE, counts[1]) for one in chunks)
