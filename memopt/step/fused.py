"""A captured step with its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.step.build import Lowering
from memopt.step.captured import Captured


@dataclass(frozen=True)
class Fused:
    """A captured step with its kernels."""

    captured: Captured
    lowering: Lowering
    notes: tuple[str, ...] = ()
    kernels: str = "aten"
    aten_regions: tuple[str, ...] = ()
    channels_last: bool = False
