"""Models that are planned in parts, for `test_parts.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def nothing(x: torch.Tensor) -> float:
    """Return 0, computed from a number in Python that no graph can hold."""
    return 0.0 * math.erf(x.detach().mean().item())


def layers(width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 16)
    )


class Routed(nn.Module):
    """Two experts, of which a number that is read in Python chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.one, self.other = nn.Linear(16, 2), layers(), layers(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.one if self.gate(x).mean().item() > 0 else self.other
        return x + chosen(x) + nothing(x)


class Blocks(nn.Module):
    def __init__(self, middle: Callable[[], nn.Module] = Routed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.blocks = layers(), nn.ModuleList([middle()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return x


class Spoken(nn.Module):
    """Looks at a number, and computes around that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * (1.0 + float(y.detach().mean() > 0)) + nothing(y)


class Shares(nn.Module):
    """Calls a module as a part of another one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Sequential(layers(8)))
        self.outer = nn.Sequential(self.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(x)
        return y * (1.0 + float(y.detach().mean() > 0)) + nothing(y)


class Softened(nn.Module):
    """A softmax, whose backward does not read its input, between wide layers that look at it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.soft = nn.Linear(16, 256), nn.Sequential(nn.Softmax(-1))
        self.narrow = nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.soft(self.wide(x) * 2)
        return self.narrow(shares) * float(shares.detach().sum() > 0) + nothing(x)


class Deepening(nn.Module):
    """Runs as many of its blocks as a number in Python says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(layers() for _ in range(6))

    def forward(self, x: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: int(depth)]:
            x = x + block(x)
        return x + nothing(x)


class Spare(nn.Module):
    """Returns what a part makes that a loss need not use, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.block, self.spare = layers(), Spoken(), layers()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.block(self.head(x))
        return y, self.spare(y)


class Selecting(Spoken):
    """Has as many rows as its values say, which only AOTAutograd refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y[y.mean(1) > 0]


class Twice(nn.Module):
    """Calls one sub-module twice, with other shapes, and never another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle = layers(), layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inner(x)
        first = first + nothing(first)
        return first + torch.cat([self.inner(first[:32]), first[32:]])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nothing(x)
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nothing(x)
        return self.inner(x)


class ByMethod(nn.Module):
    """Is never called itself: others call what is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class UsesMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = ByMethod()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nothing(x)
        return self.tower.features(x)


class Doubled(ByMethod):
    """Has a call of its own around that of torch."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)


class UsesDoubled(UsesMethod):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Doubled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x) + nothing(x)


class Ragged(nn.Module):
    """As many rows as a number says: another shape in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(x[: rows.item()]) + nothing(x)


class Holding(nn.Module):
    """Holds a module by an attribute, not in a list."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held, self.last = held, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.held(x))


class Counted(nn.Module):
    """Nothing in it can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x * (1.0 + float(x.mean() > 0)) + nothing(x)


class _Both(torch.autograd.Function):
    """Two results: autograd makes zeros of a gradient that is missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradients[0] + 2 * gradients[1]


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layers(256), layers()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = _Both.apply(self.wide(x))  # type: ignore[no-untyped-call]
        return self.narrow(one), other


class HalfUsed(nn.Module):
    """Uses one of its part's outputs, for which alone no planned backward is known."""

    def __init__(self) -> None:
        super().__init__()
        self.fork = Forked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nothing(x)
        return x + self.fork(x)[0]


class KeepsKeys(nn.Module):
    """Hands its blocks what no plan takes, unless it is called with `use_cache=False`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.block = TakesKeys()

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        x = x + nothing(x)
        return x + self.block(x, SimpleNamespace() if use_cache else None)


class TakesKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor, keys: SimpleNamespace | None) -> torch.Tensor:
        if keys is not None:
            keys.last = x
        return nn.functional.gelu(self.inner(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = layers(), layers(256)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = [self.below(x)]
        return [*states, self.above(states[0])]


class ReadsState(nn.Module):
    """Uses one of its part's hidden states, as LLaVA does, another one where `last` says so, and a
    part's only output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.head, self.last = Tower(), layers(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nothing(x)
        return self.head(self.tower(x)[self.last])


class _Again(torch.autograd.Function):
    """Keeps its input alone: its backward calls the block again, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: ByMethod) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block.features(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            ctx.block.features(x).backward(gradient)
        return x.grad, None


class _Layer(ByMethod):
    """Could be called itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.features(x)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(16, 16), _Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Again.apply(self.first(x), self.block)  # type: ignore[no-untyped-call]
        return y
