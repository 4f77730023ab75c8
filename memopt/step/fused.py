"""A captured step with its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.step.build import Lowering
from memopt.step.captured import Captured


@dataclass(frozen=True)
class Fused:
    """A captured step with its kernels.

    Attributes:
        captured: the step.
        lowering: the captured step's, unpriced.
        notes: for the user.
        kernels: the kind of kernels asked for.
        aten_regions: keys of the regions that stay ATen's, sorted.
        channels_last: whether its images were put in channels-last order.
    """

    captured: Captured
    lowering: Lowering
    notes: tuple[str, ...] = ()
    kernels: str = "aten"
    aten_regions: tuple[str, ...] = ()
    channels_last: bool = False
