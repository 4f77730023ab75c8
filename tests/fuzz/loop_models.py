"""Models that random training loops train (`tests.fuzz.loops`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24
"""Of a row of a batch."""


class Mlp(nn.Module):
    """Dropout, batch norm, a buffer that counts, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32)
        )
        self.left, self.right = nn.Linear(32, WIDTH), nn.Linear(32, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        hidden = self.body(x).relu()
        return self.left(hidden), self.right(hidden)


class Images(nn.Module):
    """Convolutions with a residual, as most vision models."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        images = F.pad(x, (0, 192 - WIDTH)).reshape(-1, 3, 8, 8) if x.shape[1] == WIDTH else x
        hidden = F.max_pool2d(self.norm(self.stem(images)).relu(), 2)
        hidden = hidden + self.block(hidden)
        return self.head(F.dropout(hidden.mean((2, 3)), 0.1, self.training))


class Tokens(nn.Module):
    """Attention over a few tokens; a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH // 4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WIDTH // 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.body(self.embed(x.reshape(len(x), 4, -1)))
        logits = self.head(hidden)
        return {"logits": logits if scale is None else logits * scale, "pooled": hidden.mean(1)}


class Recurrent(nn.Module):
    """A GRU whose weights every step uses, a learned first state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, 12))
        self.body = nn.GRU(WIDTH // 4, 12, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.expand(-1, len(x), -1).contiguous()
        out, last = self.body(x.reshape(len(x), 4, -1), first)
        return self.head(out[:, -1] + last[0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp, "images": Images, "tokens": Tokens, "recurrent": Recurrent,
}  # fmt: skip
