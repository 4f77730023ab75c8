"""Small models in plain torch, for the demo and the notebooks, and the demo's real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.commands.torchvision import REMEDY, without_broken_torchvision

_MISSING = "{name} is left out: install {package} (pip install {package})"


@dataclass(frozen=True)
class DemoTask:
    """A model, an endless stream of batches, and its loss: `loss(model, batch)`."""

    name: str
    model: nn.Module
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    loss: Callable[[Any, Tensor], Tensor]


def resnet50(batch: int = 8, size: int = 128) -> DemoTask:
    """Make torchvision's ResNet-50 on scikit-learn's digits, enlarged to size x size."""
    try:
        # Neither package has type information.
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        from torchvision import models  # type: ignore[import-untyped]
    except ImportError as error:
        package = "torchvision scikit-learn"
        raise ImportError(_MISSING.format(name="ResNet-50", package=package)) from error
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32, device="cpu")
    labels = torch.tensor(digits.target, device="cpu")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            chosen = torch.randint(len(images), (batch,), generator=generator, device="cpu")
            small = images[chosen, None].expand(-1, 3, -1, -1)
            yield functional.interpolate(small, size=(size, size)), labels[chosen]

    return DemoTask(
        f"ResNet-50, {batch} images of {size} x {size}",
        models.resnet50(num_classes=10),
        batches,
        functional.cross_entropy,
    )


def gpt2(batch: int = 4, length: int = 128) -> DemoTask:
    """Make Hugging Face's GPT-2, 12 layers, d = 256, on the bytes of Python's documentation."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        package = "transformers"
        raise ImportError(_MISSING.format(name="GPT-2", package=package)) from error
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=12,
        n_embd=256,
        n_head=8,
        n_positions=length,
        vocab_size=256,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )

    return DemoTask(
        f"GPT-2, 12 layers, d=256, {batch} x {length} bytes of text",
        GPT2LMHeadModel(config),
        _text_batches(batch, length),
        lambda output, target: _token_loss(output.logits, target),
    )


class DecoderLayer(nn.Module):
    """A layer of a decoder: causal attention and a feed-forward part, each beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.split, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.split(self.before(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        wide: Tensor = self.wide(x)
        return x + wide


class Decoder(nn.Module):
    """A decoder like GPT-2's in plain torch: from tokens to logits, or with `labels` to its
    loss."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 256,
        heads: int = 8,
        vocabulary: int = 256,
        longest: int = 2048,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map (batch, length) to (batch, length, vocabulary), or to the loss of predicting each
        next label."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.last(x))
        if labels is None:
            return logits
        return _token_loss(logits[:, :-1], labels[:, 1:])


class ResidualBlock(nn.Module):
    """Two convolutions beside a skip (He et al., arXiv:1512.03385, Figure 2)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        )
        self.second = nn.Sequential(
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.skip = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inside, h, w) to (batch, outside, h / stride, w / stride)."""
        return functional.relu(self.second(functional.relu(self.first(x))) + self.skip(x))


class ResidualNet(nn.Module):
    """A ResNet of basic blocks in plain torch; with its defaults ResNet-18's layers."""

    def __init__(
        self,
        classes: int = 10,
        widths: tuple[int, ...] = (64, 128, 256, 512),
        blocks: tuple[int, ...] = (2, 2, 2, 2),
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0])
        )
        groups = []
        for group, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            before, stride = widths[max(0, group - 1)], 1 if group == 0 else 2
            groups += [
                ResidualBlock(width if block else before, width, 1 if block else stride)
                for block in range(count)
            ]
        self.blocks = nn.Sequential(*groups)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, h, w) to (batch, classes)."""
        x = functional.max_pool2d(functional.relu(self.stem(images)), 3, 2, 1)
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


def decoder(batch: int = 4, length: int = 128, width: int = 256, layers: int = 12) -> DemoTask:
    """Make a decoder like GPT-2's, written in plain torch, on bytes of text."""
    torch.manual_seed(0)
    return DemoTask(
        f"a decoder of {layers} layers, d={width}, {batch} x {length} bytes of text",
        Decoder(layers, width, longest=length),
        _text_batches(batch, length),
        _token_loss,
    )


def _text_batches(batch: int, length: int) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    from pydoc_data import topics

    text = "\n".join(topics.topics.values()).encode("ascii", "ignore")
    tokens = torch.tensor(list(text), dtype=torch.long, device="cpu")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            last = len(tokens) - length - 1
            starts = torch.randint(last, (batch,), generator=generator, device="cpu")
            rows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return batches


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tasks() -> tuple[list[DemoTask], list[str]]:
    """Return the demo's models, and which are left out and what installs them."""
    with without_broken_torchvision() as fault:
        found, missing = [], []
        for make in (gpt2, resnet50):
            try:
                found.append(make())
            except ImportError as error:
                missing.append(str(error))
    if fault is not None:
        missing[-1] = f"ResNet-50 is left out: torchvision fails ({fault}); {REMEDY}"
    return found or [decoder()], missing
