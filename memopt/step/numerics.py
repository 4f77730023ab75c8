"""Torch's global settings that decide which kernel runs a call. Costs are stored by them, and
results depend on them."""

from __future__ import annotations

from typing import Any

import torch

_PRECISIONS = (
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)
_OTHERS = (
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
    "mkldnn.deterministic",
)
_DEFAULTS = {
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cudnn.enabled": True,
    "mkldnn.enabled": True,
}


def _read(name: str) -> Any:
    found: Any = torch.backends
    for part in name.split("."):
        found = getattr(found, part)
    return found


def precisions() -> dict[str, str]:
    """Return the precision in which each library multiplies float32, by its name in
    `torch.backends`."""
    return {name: str(_read(name)).replace("ieee", "none") for name in _PRECISIONS}


def set_precision(name: str, value: str) -> None:
    """Set one of `precisions`."""
    owner, _, attribute = name.rpartition(".")
    setattr(_read(owner), attribute, value)


class KernelSettings:
    """Reads the settings that decide which kernels run on a device, in microseconds."""

    def __init__(self, device: torch.device) -> None:
        own = "mkldnn." if device.type == "cpu" else "cu"
        self._names = [name for name in (*_PRECISIONS, *_OTHERS) if name.startswith(own)]
        places = [name.rpartition(".") for name in self._names]
        self._places = [(_read(owner), attribute) for owner, _, attribute in places]

    def read(self) -> tuple[Any, ...]:
        """Return the present settings."""
        return tuple(getattr(owner, attribute) for owner, attribute in self._places)

    def difference(self, before: tuple[Any, ...]) -> str:
        """Say which setting has changed since `before`; "" if none has."""
        return next(
            (
                f"torch.backends.{name} was {was!r} in the forward and is {now!r} in its backward"
                for name, was, now in zip(self._names, before, self.read(), strict=True)
                if was != now
            ),
            "",
        )


def numeric_settings() -> str:
    """Return the settings that differ from torch's defaults, as text; "" if none does."""
    found: dict[str, Any] = {**precisions(), **{name: _read(name) for name in _OTHERS}}
    odd = [
        f"{name}={value}"
        for name, value in found.items()
        if value != _DEFAULTS.get(name, "none" if name in _PRECISIONS else False)
    ]
    if torch.are_deterministic_algorithms_enabled():
        odd.append(f"deterministic fill={torch.utils.deterministic.fill_uninitialized_memory}")  # type: ignore[attr-defined]  # torch sets it on the module's class
    if torch.backends.cudnn.benchmark:
        odd.append(f"benchmark_limit={torch.backends.cudnn.benchmark_limit}")
    return " ".join(odd)
