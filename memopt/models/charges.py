"""Memory that a training loop needs beside a module's step, and of which the module's own graph
knows nothing."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Charges:
    """What is charged beside a step's graph. All bytes are at least 0.

    Attributes:
        boundary_bytes: what the user's loss needs between the forward and the backward, beside the
            outputs, their gradients and what is kept.
        kept_bytes: what the loop keeps from its loss to its next one: resident.
        state_bytes: the optimizer's state: resident.
        forward_bytes: what is there until the forward returns: the last step's outputs.
        held_bytes: what is there until the backward begins: gradients that are dropped then.
    """

    boundary_bytes: int = 0
    kept_bytes: int = 0
    state_bytes: int = 0
    forward_bytes: int = 0
    held_bytes: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything to charge."""
        return any(astuple(self))

    @property
    def resident_bytes(self) -> int:
        """What is there from step to step."""
        return self.kept_bytes + self.state_bytes

    def largest(self, other: Charges) -> Charges:
        """The larger of each."""
        return Charges(*map(max, astuple(self), astuple(other)))

    def beyond(self, charged: Charges) -> Charges:
        """What is left of these where others are in the graph already: those of the forward, which
        no graph has, stay whole."""
        return Charges(
            max(0, self.boundary_bytes - charged.boundary_bytes),
            max(0, self.kept_bytes - charged.kept_bytes),
            max(0, self.state_bytes - charged.state_bytes),
            self.forward_bytes,
            self.held_bytes,
        )


NO_CHARGES = Charges()
