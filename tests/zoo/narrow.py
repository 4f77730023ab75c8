"""The same architecture with fewer channels."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

SMALLEST = 8
"""Channel counts below this are kept: images' colours, squeezed channels."""


def narrow(model: nn.Module, by: int) -> nn.Module:
    """Replace each convolution, linear layer and batch norm by one of 1/by of its channels.

    A count is mapped by its value alone, so that neighbours keep fitting; where tensors are
    concatenated the counts must be multiples of `by`. The new layers have torch's default
    initialisation and take the place of the old ones, whose weights are not read (they may be on
    the meta device).
    """
    for name, layer in list(model.named_children()):
        replacement = _narrowed(layer, by)
        if replacement is None:
            narrow(layer, by)
        else:
            setattr(model, name, replacement)
    return model


def _narrowed(layer: nn.Module, by: int) -> nn.Module | None:
    def fewer(channels: int) -> int:
        return channels if channels < SMALLEST else max(1, channels // by)

    if isinstance(layer, _ConvNd):
        depthwise = layer.groups > 1 and layer.groups == layer.in_channels
        # A model's own subclass may have another signature.
        plain = next(
            kind for kind in type(layer).__mro__ if kind.__module__ == nn.Conv2d.__module__
        )
        return plain(
            fewer(layer.in_channels),
            fewer(layer.out_channels),
            kernel_size=layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=fewer(layer.groups) if depthwise else layer.groups,
            bias=layer.bias is not None,
        )
    if isinstance(layer, nn.Linear):
        return nn.Linear(
            fewer(layer.in_features), fewer(layer.out_features), bias=layer.bias is not None
        )
    if isinstance(layer, _BatchNorm):
        return type(layer)(fewer(layer.num_features), eps=layer.eps, momentum=layer.momentum)
    return None
