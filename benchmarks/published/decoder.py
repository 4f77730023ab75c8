"""One rank's decoder as a published row describes it, to be captured on `meta`.

How a framework computes a layer decides what it keeps for the backward, so `Style` names what
differs: norms and positions in single steps in float32 (`eager`) or as one kernel each, the loss,
and the dtype of the parameters. Tensor parallelism divides heads, feed-forward and vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import memopt


@torch.library.custom_op("published::moved_rows", mutates_args=())
def moved_rows(x: Tensor, ranks: int, gather: bool) -> Tensor:
    """Copy as a gather or a scatter of a sequence's rows does, which no kernel is fused with."""
    return x.repeat(1, ranks, 1) if gather else x[:, : x.shape[1] // ranks].clone()


@moved_rows.register_fake
def _(x: Tensor, ranks: int, gather: bool) -> Tensor:
    rows = x.shape[1] * ranks if gather else x.shape[1] // ranks
    return x.new_empty(x.shape[0], rows, x.shape[2])


def _keep_ranks(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.ranks, ctx.gather = inputs


def _moved_back(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
    return moved_rows(slope, ctx.ranks, not ctx.gather), None, None


moved_rows.register_autograd(_moved_back, setup_context=_keep_ranks)


@dataclass(frozen=True)
class Style:
    """How a layer is computed.

    Attributes:
        eager: norms and positions in steps of their own, in float32; else one kernel each.
        scores: attention as product, softmax and dropout of S x S scores.
        wide_softmax: that softmax is one of float32.
        apart: the model returns its logits, for a loss that is not compiled with it.
        spread: rows of a sequence are spread over the ranks of `tensor` between products.
        alone: layers are compiled one by one: no kernel is of two.
        loss: "none": layers alone, without a head; "float": cross entropy of logits in float32;
            "parallel": of a rank's share of those; "own": of logits in their dtype;
            "in place": Megatron's, which overwrites float32 logits; "chunks": of eight parts.
        packed: query, key and value are views of one result, which the value keeps alive. Adapters
            of some of the three are widened by an index_copy, whose backward keeps what it copies.
        held: the caller has a name for the logits until the next step.
        lora: layers with adapters, of "query key value projection mlp head"; and their rank.
        tensor: ranks that share each layer.
    """

    eager: bool = True
    scores: bool = False
    loss: str = "float"
    packed: bool = False
    lora: tuple[str, ...] = ()
    rank: int = 0
    tensor: int = 1
    lora_dropout: float = 0.0
    wide_softmax: bool = False
    apart: bool = False
    held: bool = False
    spread: bool = False
    alone: bool = False

    def gathered(self, x: Tensor) -> Tensor:
        return moved_rows(x, self.tensor, True) if self.spread else x

    def scattered(self, x: Tensor) -> Tensor:
        return moved_rows(x, self.tensor, False) if self.spread else x


class Norm(nn.Module):
    """A layer norm or an RMS norm, the latter in eager's steps in float32 or in one kernel."""

    def __init__(self, width: int, kind: str, bias: bool, eager: bool) -> None:
        super().__init__()
        fused = kind == "layer" or not eager
        # A layer norm without a bias moves a fused RMS norm's bytes.
        self.fused = nn.LayerNorm(width, bias=bias and kind == "layer") if fused else None
        self.weight = None if fused else nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused(x)
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        assert self.weight is not None
        return (scaled * self.weight.float()).to(x.dtype)


class Linear(nn.Module):
    """A linear layer, frozen beside an adapter of low rank where there are adapters."""

    def __init__(
        self, wide: int, narrow: int, bias: bool, name: str, style: Style, key: int = 0
    ) -> None:
        super().__init__()
        self.base = nn.Linear(wide, narrow, bias=bias)
        self.base.requires_grad_(not style.rank)
        self.drop = style.lora_dropout
        self.narrow = self.widen = None
        self.padded = 0
        if name in style.lora:
            if style.packed and name == "query" and "key" not in style.lora:
                self.padded = narrow - key
            self.narrow = nn.Linear(wide, style.rank, bias=False)
            self.widen = nn.Linear(style.rank, narrow - (key if self.padded else 0), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if self.narrow is not None and self.widen is not None:
            more = self.widen(self.narrow(functional.dropout(x, self.drop)))
            more = _Padded.apply(more, y.shape[-1]) if self.padded else more
            y = y + more * 2.0
        return y


class _Padded(torch.autograd.Function):
    """Takes the memory of index_copy into zeros, whose backward keeps what it copied."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(given)
        return functional.pad(given, (0, width - given.shape[-1]))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (given,) = ctx.saved_tensors
        return torch.where(given == given, slope[..., : given.shape[-1]], 0), None


class Layer(nn.Module):
    """Attention and feed-forward of a shape (see `benchmarks.published`), of one rank."""

    def __init__(self, shape: Mapping[str, Any], style: Style) -> None:
        super().__init__()
        width, bias, parts = shape["hidden"], shape.get("bias", False), style.tensor
        self.shape, self.style = shape, style
        self.head = shape.get("head_width", width // shape["heads"])
        self.heads, self.groups = shape["heads"] // parts, max(1, shape["kv_heads"] // parts)
        kind = shape.get("norm", "layer")
        self.before = Norm(width, kind, bias, style.eager)
        alone = shape.get("shared_norm")
        self.between = None if alone else Norm(width, kind, bias, style.eager)
        each = [Norm(self.head, kind, bias, style.eager) for _ in "qk" if shape.get("qk_norm")]
        self.of_heads = nn.ModuleList(each)
        sizes = {"query": self.heads, "key": self.groups, "value": self.groups}
        if style.packed:
            sizes = {"query": self.heads + 2 * self.groups}
        for name, count in sizes.items():
            key = self.groups * self.head
            setattr(self, name, Linear(width, count * self.head, bias, name, style, key))
        self.out = Linear(self.heads * self.head, width, bias, "projection", style)
        inner = shape["ffn"] // parts
        self.up = Linear(width, inner, bias, "mlp", style)
        self.gate = Linear(width, inner, bias, "mlp", style) if shape.get("gated") else None
        self.down = Linear(inner, width, bias, "mlp", style)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.style.gathered(self.before(x))
        if self.style.packed:
            sizes = [count * self.head for count in (self.heads, self.groups, self.groups)]
            parts = self.query(y).split(sizes, -1)
        else:
            parts = (self.query(y), self.key(y), self.value(y))
        q, k, v = (one.unflatten(-1, (-1, self.head)).transpose(1, 2) for one in parts)
        if self.of_heads:
            q, k = (norm(one) for norm, one in zip(self.of_heads, (q, k), strict=True))
        if self.shape.get("positions") == "rope":
            q, k = self._turned(q, turns), self._turned(k, turns)
        if self.groups < self.heads and (self.style.eager or self.style.scores):
            k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (k, v))
        mixed = self.out(self._attention(q, k, v).transpose(1, 2).flatten(2))
        mixed = self._dropped(self.style.scattered(mixed))
        if self.shape.get("parallel_residual"):
            return x + mixed + self._fed(y if self.between is None else self.between(x))
        x = x + mixed
        y = self.style.gathered(y if self.between is None else self.between(x))
        x = x + self._dropped(self.style.scattered(self._fed(y)))
        return moved_rows(x, 1, False) if self.style.alone else x

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = self.shape.get("attention_dropout", self.shape.get("dropout", 0.0))
        if not self.style.scores:
            how = {"dropout_p": rate, "is_causal": True, "enable_gqa": self.groups < self.heads}
            return functional.scaled_dot_product_attention(q, k, v, **how)
        scores = q @ k.transpose(-1, -2)
        scores = scores.float() if self.style.wide_softmax else scores
        return functional.dropout(torch.softmax(scores, -1).to(q.dtype), rate) @ v

    def _fed(self, y: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(y)))
        return self.down(functional.silu(self.gate(y)) * self.up(y))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.shape.get("dropout", 0.0))

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        if not self.style.eager:
            return x * turns
        wide = x.float()
        one, other = wide.chunk(2, -1)
        return (wide * turns + torch.cat((-other, one), -1) * turns).to(x.dtype)


class _InPlace(torch.autograd.Function):
    """Takes the memory of Megatron's cross entropy, which makes the float32 copy of the logits into
    their softmax, and that into their gradient, in place. Its value is no loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shares = logits.float()
        ctx.save_for_backward(shares)
        ctx.dtype = logits.dtype
        return -shares.gather(-1, targets.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (shares,) = ctx.saved_tensors
        return shares.to(ctx.dtype) * slope.to(ctx.dtype), None


class Decoder(nn.Module):
    """A stage of layers, with the loss; the first has the embedding, and takes tokens, the others
    hidden states."""

    def __init__(
        self, shape: Mapping[str, Any], style: Style, layers: int, sequence: int, first: bool
    ) -> None:
        super().__init__()
        width, words = shape["hidden"], -(-shape["vocabulary"] // style.tensor)
        self.shape, self.style = shape, style
        head = Linear(width, words, False, "head", style)
        self.words = nn.Embedding(words, width) if first else None
        if self.words is not None and shape.get("tied"):
            self.words.weight = head.base.weight
        learned = first and shape.get("positions", "learned") == "learned"
        self.places = nn.Embedding(sequence, width) if learned else None
        for table in (self.words, self.places):
            if table is not None:
                table.requires_grad_(not style.rank)
        self.layers = nn.ModuleList(Layer(shape, style) for _ in range(layers))
        kind, bias = shape.get("norm", "layer"), shape.get("bias", False)
        whole = style.loss != "none"
        self.norm = Norm(width, kind, bias, style.eager) if whole else None
        for name, parameter in self.named_parameters():
            if style.rank and any(w in name for w in ("norm", "before", "between", "of_heads")):
                parameter.requires_grad_(False)
        self.head = head if whole else None
        rotated = shape.get("head_width", width // shape["heads"])
        self.register_buffer("turns", torch.zeros(sequence, rotated))

    def forward(self, given: Tensor, targets: Tensor | None = None) -> Any:
        x = given
        if self.words is not None:
            x = self.words(given)
            if self.places is not None:
                x = x + self.places.weight
            x = self.style.scattered(functional.dropout(x, self.shape.get("dropout", 0.0)))
        for layer in self.layers:
            x = layer(x, self.turns)
        if self.norm is None or self.head is None:
            return x.sum()
        parts = self.style.gathered(self.norm(x)).chunk(8 if self.style.loss == "chunks" else 1, 1)
        logits = [self.head(part).flatten(0, 1) for part in parts]
        if targets is None:
            return logits
        loss = self.loss(logits, targets)
        return (loss, *(one.detach() for one in logits)) if self.style.held else loss

    def loss(self, logits: list[Tensor], targets: Tensor) -> Tensor:
        rights = targets.chunk(len(logits), 1)
        losses = [self._loss(*pair) for pair in zip(logits, rights, strict=True)]
        return losses[0] if len(losses) == 1 else sum(losses, losses[0].new_zeros(()))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.style.loss == "in place":
            return _InPlace.apply(logits, targets.flatten())
        logits = logits if self.style.loss == "own" else logits.float()
        if self.style.loss == "parallel":
            return _Parallel.apply(logits, targets.flatten())
        return functional.cross_entropy(logits, targets.flatten())


class _Parallel(torch.autograd.Function):
    """Takes the memory of torch's loss of logits that ranks share, in the steps of
    torch/distributed/tensor/parallel/loss.py. Its value is no loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        logs = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(logs, targets)
        return -logs.gather(-1, targets.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        logs, targets = ctx.saved_tensors
        hit = torch.zeros_like(logs).scatter_(-1, targets.unsqueeze(-1), -1.0)
        # The result reads `logs`: torch's frame holds them to its end.
        return torch.addcmul(hit + logs.exp(), logs, slope), None


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard as torchtitan does: gathered in bfloat16, gradients averaged in float32."""
    return memopt.shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LossApart(nn.Module):
    """A decoder's loss alone."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._loss = decoder.loss

    def forward(self, targets: Tensor, *logits: Tensor) -> Tensor:
        return self._loss(list(logits), targets)
