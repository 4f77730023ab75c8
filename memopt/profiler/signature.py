"""What makes two kernel calls the same measurement, and stand-in arguments to run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument by everything that decides its kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}s{list(self.stride)}+{self.offset}"


def _replace(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(v, leaf) for v in value)
    if isinstance(value, dict):
        return {k: _replace(v, leaf) for k, v in value.items()}
    return leaf(value)


def _describe(value: Any) -> Any:
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, (list, tuple)):
        return type(value)(_describe(v) for v in value)
    if isinstance(value, torch.Tensor):
        return TensorArgument(
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
            value.dtype,
            value.untyped_storage().nbytes(),
        )
    return value


@dataclass(frozen=True)
class Signature:
    """One kernel call with its arguments described; `text` identifies it."""

    target: Any
    args: Any
    kwargs: Any
    text: str


def signature(node: Node) -> Signature:
    """The signature of a kernel-call node of a joint graph."""
    args = _replace(tuple(node.args), _describe)
    kwargs = _replace(dict(node.kwargs), _describe)
    shown = _replace((args, kwargs), str)
    return Signature(node.target, args, kwargs, f"{node.target}{shown}")


class Arena:
    """Stand-in tensor arguments, one flat buffer per dtype shared by all signatures.

    Values are harmless for every kernel: floats uniform in [0, 1), integers 0, booleans True.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def _grown(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < elements:
            self._buffers.pop(dtype, None)
            if dtype.is_floating_point or dtype.is_complex:
                real = torch.float32 if not dtype.is_complex else dtype
                buffer = torch.rand(elements, device=self._device, dtype=real).to(dtype)
            elif dtype is torch.bool:
                buffer = torch.ones(elements, device=self._device, dtype=dtype)
            else:
                buffer = torch.zeros(elements, device=self._device, dtype=dtype)
            self._buffers[dtype] = buffer
        return buffer

    def reserve(self, signatures: list[Signature]) -> None:
        """Make the buffers large enough for every signature before any is measured."""
        for one in signatures:
            self.arguments(one)

    def arguments(self, one: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Real arguments for a call; distinct tensor arguments do not overlap."""
        need: dict[torch.dtype, int] = {}

        def count(value: Any) -> Any:
            if isinstance(value, TensorArgument):
                size = -(-value.storage_bytes // value.dtype.itemsize)
                need[value.dtype] = need.get(value.dtype, 0) + size
            return value

        _replace((one.args, one.kwargs), count)
        for dtype, elements in need.items():
            self._grown(dtype, elements)
        used: dict[torch.dtype, int] = {}

        def take(value: Any) -> Any:
            if not isinstance(value, TensorArgument):
                return value
            start = used.get(value.dtype, 0)
            used[value.dtype] = start + -(-value.storage_bytes // value.dtype.itemsize)
            return self._buffers[value.dtype].as_strided(
                value.shape, value.stride, start + value.offset
            )

        args, kwargs = _replace((one.args, one.kwargs), take)
        return args, kwargs
