"""Small decoders that engines train: GPT-like, Llama-like, and with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn import functional

VOCABULARY, WIDTH, TOKENS = 64, 32, 16
STEPS, MICRO_BATCHES = 5, 2
Wrap = Callable[[Any], Any]
Ran = tuple[list[float], list[Tensor], int | None]
"""Losses and norms; a rank's parameters; the most bytes of a last micro-batch, if it is metered."""


@dataclass(frozen=True)
class Subject:
    """A decoder: its kind of norm and of feed-forward, and how many heads have keys."""

    text: str
    norm: type[nn.Module]
    gated: bool = False
    experts: int = 0
    key_heads: int = 4


SUBJECTS = {
    "gpt": Subject("GPT-like", nn.LayerNorm),
    "llama": Subject("Llama-like", nn.RMSNorm, gated=True, key_heads=2),
    "moe": Subject("Mixture of experts", nn.RMSNorm, gated=True, experts=4),
}


class Attention(nn.Module):
    """Causal attention of heads of eight, as many as the (sharded) projections hold."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, 8 * key_heads, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens = x.shape[:2]
        q, k, v = (
            one(x).view(rows, tokens, -1, 8).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class FeedForward(nn.Module):
    """Two or, gated, three projections."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.gate = nn.Linear(WIDTH, 64) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        gated = functional.gelu(hidden) if self.gate is None else functional.silu(self.gate(x))
        return self.down(gated if self.gate is None else gated * hidden)


def chosen(router: nn.Module, x: Tensor) -> Tensor:
    """Weigh the expert that a router takes for each token; the others' weights are 0."""
    shares = router(x).softmax(-1)
    return functional.one_hot(shares.argmax(-1), shares.shape[-1]) * shares


def mixed(experts: nn.ModuleList, x: Tensor, weights: Tensor, first: int = 0) -> Tensor:
    """Add up what experts make of tokens, `first` being the number of the first of them."""
    parts = [expert(x) * weights[..., i : i + 1] for i, expert in enumerate(experts, first)]
    return torch.stack(parts).sum(0)


class Experts(nn.Module):
    """Experts of which each token takes the best, weighted: all compute, a mask chooses."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(FeedForward(True) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.experts, x, chosen(self.router, x))


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, of: Subject) -> None:
        super().__init__()
        self.first, self.second = of.norm(WIDTH), of.norm(WIDTH)
        self.attention = Attention(of.key_heads)
        self.feed = Experts(of.experts) if of.experts else FeedForward(of.gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Embedded(nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places.weight


class Decoder(nn.Module):
    """Two blocks between embeddings and logits."""

    def __init__(self, of: Subject) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Embedded()
        self.blocks = nn.ModuleList(Block(of) for _ in range(2))
        self.norm, self.head = of.norm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SpreadExperts(nn.Module):
    """The experts of which this rank holds some, each rank as many: every rank's tokens come to
    them, and go back."""

    def __init__(self, whole: Experts, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(whole.experts) // ranks
        self.router, self.ranks, self.first = whole.router, ranks, rank * count
        self.experts = whole.experts[self.first : self.first + count]

    def forward(self, x: Tensor) -> Tensor:
        sent, weights = self._exchanged(x), self._exchanged(chosen(self.router, x))
        return self._exchanged(mixed(self.experts, sent, weights, self.first), back=True).sum(0)

    def _exchanged(self, value: Tensor, back: bool = False) -> Tensor:
        """Every rank's value; back: what every rank made of this one's."""
        given = value if back else value.expand(self.ranks, *value.shape)
        return all_to_all_single_autograd(
            given.contiguous(), None, None, torch.distributed.group.WORLD
        )


def tensor_parallel(model: Any, mesh: DeviceMesh, sequence: bool = False) -> Any:
    """Cut a model's heads and hidden units over a mesh; with `sequence` its tokens between, too."""
    column = parallel.ColwiseParallel()
    row = parallel.RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    for block in model.blocks:
        plan: dict[str, Any] = {f"attention.{one}": column for one in "qkv"} | {"attention.o": row}
        feeds = [n for n, one in block.named_modules() if isinstance(one, FeedForward)]
        for name in feeds:
            plan |= {f"{name}.up": column, f"{name}.down": row}
            plan |= {f"{name}.gate": column} if block.get_submodule(name).gate is not None else {}
        if sequence:
            whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan |= {name: parallel.SequenceParallel() for name in ("first", "second")}
            plan |= {name: parallel.PrepareModuleInput(**whole) for name in ("attention", *feeds)}
        parallel.parallelize_module(block, mesh, plan)
    if sequence:
        split = parallel.PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
        head = parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        both: dict[str, Any] = {
            "embedding": split,
            "norm": parallel.SequenceParallel(),
            "head": head,
        }
        parallel.parallelize_module(model, mesh, both)
    return model


def blockwise(model: Any, mesh: DeviceMesh, wrap: Wrap = lambda block: block) -> Any:
    """Spread each block's parameters over a mesh by FSDP2, then what is left."""
    for block in model.blocks:
        fully_shard(wrap(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def stepped(optimizer: torch.optim.Optimizer, norm: Tensor) -> float:
    """Clip gradients by this norm, update, and return it."""
    for one in (one for group in optimizer.param_groups for one in group["params"]):
        if one.grad is not None:
            one.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0).item())
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()
