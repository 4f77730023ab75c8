"""Families that read images: torchvision's models and the hand-written ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import torchvision_shim  # noqa: F401 (before torchvision)
from tests.zoo.family import Family, Inputs, Size, class_loss
from tests.zoo.handwritten import UNet, mlp, pre_activation_resnet
from tests.zoo.narrow import narrow

from torchvision import models  # isort: skip
from torchvision.models import video  # isort: skip


def images(tiny: int, paper: int = 224) -> Callable[[Size, int, torch.Generator], Inputs]:
    """Square images (batch, 3, pixels, pixels)."""

    def make(size: Size, batch: int, generator: torch.Generator) -> Inputs:
        pixels = tiny if size == "tiny" else paper
        return (torch.randn(batch, 3, pixels, pixels, generator=generator),)

    return make


def clips(size: Size, batch: int, generator: torch.Generator) -> Inputs:
    """Video clips (batch, 3, frames, pixels, pixels)."""
    frames, pixels = (8, 32) if size == "tiny" else (16, 112)
    return (torch.randn(batch, 3, frames, pixels, pixels, generator=generator),)


def rows(size: Size, batch: int, generator: torch.Generator) -> Inputs:
    """Feature rows (batch, features) of the MLP; 64 times as many in the tiny size, whose
    activations would be nothing beside its parameters."""
    shape = (64 * batch, 64) if size == "tiny" else (batch, 3072)
    return (torch.randn(shape, generator=generator),)


def narrowed(build: Callable[[], nn.Module], by: int) -> Callable[[Size], nn.Module]:
    """The tiny size has 1/by of the channels at full depth."""

    def make(size: Size) -> nn.Module:
        if size == "paper":
            return build()
        with torch.device("meta"):
            wide = build()
        return narrow(wide, by)

    return make


def make_vit(size: Size) -> nn.Module:
    """ViT-B/16 with the dropout of its paper (torchvision's default is none).

    torchvision starts its head at zero, which would make every other gradient zero.
    """
    if size == "paper":
        model = models.vit_b_16(dropout=0.1)
    else:
        model = models.VisionTransformer(
            image_size=32,
            patch_size=8,
            num_layers=4,
            num_heads=4,
            hidden_dim=64,
            mlp_dim=256,
            dropout=0.1,
            num_classes=10,
        )
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def make_mlp(size: Size) -> nn.Module:
    """Four hidden layers."""
    return mlp(64, 256, 4, 10) if size == "tiny" else mlp(3072, 2048, 4, 1000)


def make_unet(size: Size) -> nn.Module:
    """Four levels, 64 channels at the top in the paper."""
    return UNet(width=8 if size == "tiny" else 64)


def make_resnet1001(size: Size) -> nn.Module:
    """29 layers tiny, 1001 in the paper."""
    return pre_activation_resnet(3 if size == "tiny" else 111)


def pixel_loss(logits: Tensor) -> Tensor:
    """Mean cross entropy over pixels; logits (batch, classes, height, width)."""
    batch, classes, height, width = logits.shape
    targets = torch.arange(batch * height * width, device=logits.device) % classes
    return functional.cross_entropy(logits, targets.view(batch, height, width))


def all_outputs_loss(output: Any) -> Tensor:
    """The main output's loss plus 0.3 of each auxiliary one's, as GoogLeNet is trained."""
    main, *others = [class_loss(logits) for logits in output]
    return main + 0.3 * sum(others, torch.zeros(()))


def main_output_loss(output: Any) -> Tensor:
    """The main output's loss; the auxiliary outputs are not used."""
    return class_loss(output.logits)


def _cnn(name: str, build: Callable[[], nn.Module], by: int, *tags: str) -> Family:
    return Family(name, narrowed(build, by), images(64), class_loss, frozenset({"cnn", *tags}))


def _resnet200() -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [3, 24, 36, 3])


def _inception(aux: bool) -> nn.Module:
    return models.Inception3(aux_logits=aux, init_weights=False)


def _googlenet(aux: bool) -> nn.Module:
    return models.GoogLeNet(aux_logits=aux, init_weights=False)


FAMILIES: tuple[Family, ...] = (
    _cnn("resnet50", models.resnet50, 8, "batchnorm"),
    _cnn("vgg16", models.vgg16, 8, "dropout"),
    _cnn("googlenet", lambda: _googlenet(False), 4, "batchnorm", "dropout"),
    _cnn("mobilenet_v2", models.mobilenet_v2, 4, "batchnorm", "dropout"),
    _cnn("densenet121", models.densenet121, 8, "batchnorm"),
    _cnn("efficientnet_b0", models.efficientnet_b0, 4, "batchnorm", "dropout"),
    Family(
        "inception_v3",
        narrowed(lambda: _inception(False), 4),
        images(96, 299),
        class_loss,
        frozenset({"cnn", "batchnorm", "dropout"}),
    ),
    Family("vit_b_16", make_vit, images(32), class_loss, frozenset({"transformer", "dropout"})),
    Family(
        "r3d_18",
        narrowed(video.r3d_18, 8),
        clips,
        class_loss,
        frozenset({"cnn", "batchnorm"}),
    ),
    Family("unet", make_unet, images(64), pixel_loss, frozenset({"cnn", "batchnorm"})),
    Family("mlp", make_mlp, rows, class_loss, frozenset({"dropout"})),
)
"""The eleven families among the fourteen that read images or rows."""

VARIANTS: tuple[Family, ...] = (
    _cnn("resnet18", models.resnet18, 8, "batchnorm"),
    _cnn("resnet34", models.resnet34, 8, "batchnorm"),
    _cnn("resnet101", models.resnet101, 8, "batchnorm"),
    _cnn("resnet152", models.resnet152, 8, "batchnorm"),
    _cnn("resnet200", _resnet200, 8, "batchnorm"),
    Family("resnet1001", make_resnet1001, images(32), class_loss, frozenset({"cnn", "batchnorm"})),
    _cnn("densenet161", models.densenet161, 8, "batchnorm"),
    _cnn("densenet169", models.densenet169, 8, "batchnorm"),
    _cnn("densenet201", models.densenet201, 8, "batchnorm"),
    _cnn("alexnet", models.alexnet, 8, "dropout"),
    _cnn("mnasnet", models.mnasnet1_0, 4, "batchnorm", "dropout"),
    Family(
        "googlenet_aux",
        narrowed(lambda: _googlenet(True), 4),
        images(64),
        all_outputs_loss,
        frozenset({"cnn", "batchnorm", "dropout", "aux"}),
    ),
    Family(
        "googlenet_aux_unused",
        narrowed(lambda: _googlenet(True), 4),
        images(64),
        main_output_loss,
        frozenset({"cnn", "batchnorm", "dropout", "aux"}),
    ),
    Family(
        # Its auxiliary classifier needs images of full size.
        "inception_v3_aux",
        narrowed(lambda: _inception(True), 4),
        images(299, 299),
        all_outputs_loss,
        frozenset({"cnn", "batchnorm", "dropout", "aux"}),
    ),
)
"""More of the kind, for benchmarks and special cases."""
