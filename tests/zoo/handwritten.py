"""Models written here: an MLP, a U-Net and the pre-activation ResNet-1001."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(features: int, hidden: int, layers: int, classes: int) -> nn.Sequential:
    """Linear, ReLU, dropout, `layers` times, then a classifier."""
    parts: list[nn.Module] = []
    for index in range(layers):
        parts += [nn.Linear(features if index == 0 else hidden, hidden), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts, nn.Linear(hidden, classes))


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) with padded convolutions and batch norm.

    Its four skip connections span almost the whole network: there is no short chain.
    """

    def __init__(self, width: int, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(inside, outside)
            for inside, outside in zip([3, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = _double(widths[-2], widths[-1])
        self.raise_ = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1]
        )
        self.up = nn.ModuleList(_double(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes, height, width); height and width multiples of 2^depth."""
        skips = []
        x = images
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for raise_, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([skips.pop(), raise_(x)], dim=1))
        return self.head(x)


def _double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class PreActivation(nn.Module):
    """Bottleneck block with batch norm and ReLU before each convolution (He et al., 2016)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in (inside, width, width)])
        self.first = nn.Conv2d(inside, width, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.third = nn.Conv2d(width, outside, 1, bias=False)
        self.shortcut = (
            None
            if inside == outside and stride == 1
            else nn.Conv2d(inside, outside, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; a shortcut convolution reads the activated input."""
        active = functional.relu(self.norms[0](x))
        y = self.first(active)
        y = self.second(functional.relu(self.norms[1](y)))
        y = self.third(functional.relu(self.norms[2](y)))
        return y + (x if self.shortcut is None else self.shortcut(active))


def pre_activation_resnet(blocks_per_stage: int, classes: int = 10) -> nn.Sequential:
    """9·blocks_per_stage + 2 layers; 111 blocks per stage are ResNet-1001 (He et al., 2016)."""
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    inside = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(blocks_per_stage):
            stride = 2 if block == 0 and stage > 0 else 1
            parts.append(PreActivation(inside, width, stride))
            inside = 4 * width
    return nn.Sequential(
        *parts,
        nn.BatchNorm2d(inside),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inside, classes),
    )
