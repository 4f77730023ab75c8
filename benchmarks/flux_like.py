"""A diffusion transformer of FLUX.1's published shape, on meta: 12 billion parameters.

`memopt fits benchmarks.flux_like:step --gpu RTX4090 --capacity 16GiB --lora r=16` asks
whether it trains. Shapes as in the configuration that Black Forest Labs published for FLUX.1-dev:
width 3,072, 24 heads, 19 blocks of two streams and 38 of one, text of 512 tokens. The step trains
on one image of 512 x 512 pixels, 1,024 patches of latents, whose text was encoded before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, DOUBLE, SINGLE = 3072, 24, 19, 38
PATCHES, CHANNELS, WORDS, TEXT, VECTOR = 1024, 64, 512, 4096, 768


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    one, other = x.float().chunk(2, -1)
    cosine, sine = turns.chunk(2, -1)
    return torch.cat((one * cosine - other * sine, one * sine + other * cosine), -1).to(x.dtype)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Modulation(nn.Module):
    """Shifts, scales and gates from the vector of time and text."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(width, count * width)

    def forward(self, vector: Tensor) -> tuple[Tensor, ...]:
        made: Tensor = self.linear(functional.silu(vector)).unsqueeze(1)
        return made.chunk(self.count, -1)


class Queries(nn.Module):
    """Query, key and value of one stream, the first two normed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.made = nn.Linear(width, 3 * width)
        self.query, self.key = (nn.RMSNorm(width // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(_heads, self.made(x).chunk(3, -1))
        return self.query(q), self.key(k), v


class Stream(nn.Module):
    """What a block of two streams has for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation, self.queries = Modulation(width, 6), Queries(width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def begun(self, x: Tensor, vector: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        parts = self.modulation(vector)
        return parts, self.queries(_modulated(x, parts[0], parts[1]))

    def ended(self, x: Tensor, mixed: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        x = x + parts[2] * self.out(mixed)
        y = functional.gelu(self.up(_modulated(x, parts[3], parts[4])), approximate="tanh")
        return x + parts[5] * self.down(y)


class DoubleBlock(nn.Module):
    """Image and text attend together, with weights of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image, self.text = Stream(width), Stream(width)

    def forward(
        self, image: Tensor, text: Tensor, vector: Tensor, turns: Tensor
    ) -> tuple[Tensor, Tensor]:
        own, image_parts = self.image.begun(image, vector)
        others, text_parts = self.text.begun(text, vector)
        q, k, v = (torch.cat(pair, 2) for pair in zip(text_parts, image_parts, strict=True))
        q, k = _turned(q, turns), _turned(k, turns)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        words = text.shape[1]
        image = self.image.ended(image, mixed[:, words:], own)
        return image, self.text.ended(text, mixed[:, :words], others)


class SingleBlock(nn.Module):
    """Both in one stream; attention and feed-forward side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.modulation = width, Modulation(width, 3)
        self.begin, self.end = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)
        self.query, self.key = (nn.RMSNorm(width // HEADS) for _ in range(2))

    def forward(self, x: Tensor, vector: Tensor, turns: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vector)
        begun = self.begin(_modulated(x, shift, scale))
        qkv, inner = begun.split((3 * self.width, 4 * self.width), -1)
        q, k, v = map(_heads, qkv.chunk(3, -1))
        q, k = _turned(self.query(q), turns), _turned(self.key(k), turns)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = torch.cat((mixed, functional.gelu(inner, approximate="tanh")), -1)
        return x + gate * self.end(y)


class Flux(nn.Module):
    """The transformer and its loss against the velocity that it is to predict."""

    def __init__(self, width: int, double: int, single: int) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(CHANNELS, width), nn.Linear(TEXT, width)
        self.vector = nn.Linear(VECTOR, width)
        self.doubles = nn.ModuleList(DoubleBlock(width) for _ in range(double))
        self.singles = nn.ModuleList(SingleBlock(width) for _ in range(single))
        self.last, self.out = Modulation(width, 2), nn.Linear(width, CHANNELS)

    def forward(
        self, image: Tensor, text: Tensor, vector: Tensor, turns: Tensor, velocity: Tensor
    ) -> Tensor:
        words = text.shape[1]
        image, text, vector = self.image(image), self.text(text), self.vector(vector)
        for block in self.doubles:
            image, text = block(image, text, vector, turns)
        x = torch.cat((text, image), 1)
        for block in self.singles:
            x = block(x, vector, turns)
        found = self.out(_modulated(x[:, words:], *self.last(vector)))
        return functional.mse_loss(found.float(), velocity)


def step(
    width: int = WIDTH, double: int = DOUBLE, single: int = SINGLE, patches: int = PATCHES
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Return the model in bfloat16 on meta, and the inputs of one image."""
    with torch.device("meta"):
        model = Flux(width, double, single).to(torch.bfloat16)
        half = {"dtype": torch.bfloat16}
        inputs = {
            "image": torch.zeros(1, patches, CHANNELS, **half),
            "text": torch.zeros(1, WORDS, TEXT, **half),
            "vector": torch.zeros(1, VECTOR, **half),
            "turns": torch.zeros(WORDS + patches, width // HEADS),
            "velocity": torch.zeros(1, patches, CHANNELS),
        }
    return model, inputs
