"""The request that `memopt.plan` makes of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.options import PassOptions, PlanLimits, Pricing, StepOptions
from memopt.models.progress import Progress
from memopt.strategies import Strategy


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        strategy: a name or an instance.
        limits, step, pricing, passes: the other arguments of `memopt.plan`, by records.
        charges: the memory that the loop around a wrapped model needs beside its steps.
        progress: whether to show a bar, or the callback that progress is reported to.
        keep: whether a plan that takes long to solve is kept on disk.
    """

    strategy: str | Strategy = "auto"
    limits: PlanLimits = field(default_factory=PlanLimits)
    step: StepOptions = field(default_factory=StepOptions)
    pricing: Pricing = field(default_factory=Pricing)
    passes: PassOptions = field(default_factory=PassOptions)
    charges: Charges = NO_CHARGES
    progress: bool | Progress = True
    keep: bool = False

    @property
    def options(self) -> dict[str, object]:
        """Map the names of all options to their values, whichever record holds them."""
        found: dict[str, object] = {"strategy": self.strategy, "charges": self.charges}
        for record in (self.limits, self.step, self.pricing, self.passes):
            found |= {one.name: getattr(record, one.name) for one in fields(record)}
        return found
