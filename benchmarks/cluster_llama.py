"""Llama 3 and its training step as torchtitan runs them: the operators of its model in eager
PyTorch, and its schedule, in which blocks are checkpointed, gathered again for the backward
(FSDP2's `reshard_after_forward`) and prefetched by one.

Read in torchtitan's sources at the commit that its report names (9dec370): the model
(torchtitan/models/llama/model.py), what selective checkpointing saves, and what is gathered again
(torchtitan/parallelisms/parallelize_llama.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.passes.early_collectives import with_early_collectives
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.reductions.block_checkpoints import forward_of_blocks, largest_sent_bytes, run_again

VOCABULARY = 128256
SHAPES = {
    "8B": (32, 4096, 32, 14336),
    "70B": (80, 8192, 64, 28672),
    "405B": (126, 16384, 128, 53248),
}
"""Layers, width, heads (8 of keys and values), width within the feed-forward layers."""
_ATTENTION = "scaled_dot_product"


class Block(nn.Module):
    """A layer of Llama 3: grouped attention with rotary positions, and a gated feed-forward.

    Args:
        width, heads, inner: see SHAPES.
        fused: norms are one kernel each: nn.LayerNorm without a bias stands in for a fused RMS
            norm, which moves the same bytes; else nn.RMSNorm, in eager's steps in float32.
        groups: heads of keys and values.
    """

    def __init__(self, width: int, heads: int, inner: int, fused: bool, groups: int = 8) -> None:
        super().__init__()
        self.head, self.repeats = width // heads, heads // groups
        narrow = groups * self.head
        self.before, self.between = norm(width, fused), norm(width, fused)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.before(x)
        parts = (part(y).unflatten(-1, (-1, self.head)) for part in (self.q, self.k, self.v))
        q, k, v = parts
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (self._repeated(part) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).contiguous().flatten(2))
        y = self.between(x)
        added: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return added

    def _repeated(self, value: Tensor) -> Tensor:
        """(batch, tokens, groups, head) → (batch, tokens, heads, head)."""
        return value.unsqueeze(3).expand(-1, -1, -1, self.repeats, -1).flatten(2, 3)


class Llama(nn.Module):
    """Llama 3 with its loss.

    Args:
        layers, width, heads, inner: see SHAPES.
        tokens: of a sequence.
        fused: see Block.
    """

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, tokens: int, fused: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, inner, fused) for _ in range(layers))
        self.norm, self.head = norm(width, fused), nn.Linear(width, VOCABULARY, bias=False)
        turns = torch.zeros(tokens, width // heads // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, labels.flatten())


def norm(width: int, fused: bool) -> nn.Module:
    """See Block."""
    return nn.LayerNorm(width, bias=False) if fused else nn.RMSNorm(width)


def rotated(value: Tensor, turns: Tensor) -> Tensor:
    """(batch, tokens, heads, head) turned by its position, as complex numbers in float32."""
    pairs = torch.view_as_complex(value.float().reshape(*value.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(value)


def published_step(graph: Graph, device: Device, recompute: str) -> Program:
    """torchtitan's step, on the graph of one rank.

    Every block is checkpointed: its backward begins with its forward again, whose weights are
    gathered again, but for those of the last block. Selective checkpointing keeps the results of
    attention and of every second matrix product of a block. Collectives start early, in the memory
    that one more block takes on the network: FSDP2 prefetches the next block, and holds what it
    scatters until that is over.

    Args:
        graph: of a Llama of this file, sharded by `memopt.shard`.
        device: its link rates.
        recompute: "full", "selective", "none": only weights are gathered again, or "all": nothing.
    """
    blocks = forward_of_blocks(graph)
    last = list(blocks)[-1]
    again = {
        name: set(members) - _kept(graph, members, recompute, name == last)
        for name, members in blocks.items()
    }
    program = run_again(graph, again)
    room_bytes = replay(graph, program, device).peak_bytes + largest_sent_bytes(graph)
    return with_early_collectives(graph, program, room_bytes, device)


def _kept(graph: Graph, members: Iterable[int], recompute: str, last: bool) -> set[int]:
    """The forward operators of a block whose results stay for its backward."""
    if recompute == "all":
        return set(members)
    kept: set[int] = set()
    products = 0
    for index in members:
        operator = graph.operators[index]
        gathers = operator.collective is not None
        product = "aten.mm" in operator.target
        products += product
        saved = _ATTENTION in operator.target or (product and products % 2 == 1)
        saved = saved if recompute == "selective" else recompute == "none" and not gathers
        if saved or (last and gathers):
            kept.add(index)
    return kept
