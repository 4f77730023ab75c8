"""The names of all possible violations by a program or a chain schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ViolationCode(StrEnum):
    """One code for each kind of violation."""

    UNKNOWN_INSTRUCTION = "not an instruction of this kind of plan"
    UNKNOWN_OPERATOR = "no such operator"
    UNKNOWN_TENSOR = "no such tensor"
    UNKNOWN_IMPLEMENTATION = "no such implementation"
    UNKNOWN_STAGE = "no such stage"
    OUTPUT_NOT_WRITTEN = "keeps a tensor that the operator does not write"
    OUTPUT_REPEATED = "keeps a tensor twice"
    RESIDENT_MOVED = "frees or moves a resident tensor"
    OPERATOR_MISSING = "an operator with effects never runs"
    NOT_RECOMPUTABLE = "runs an operator again that must run once"
    RANDOM_ORDER = "random operators do not run first in the graph's order"
    RANDOM_AFTER_LOSS = "a random operator of the forward runs first after the loss boundary"
    COLLECTIVE_ORDER = "collectives do not run first in the graph's order"
    NO_LOSS_BOUNDARY = "no loss boundary"
    SECOND_LOSS_BOUNDARY = "a second loss boundary"
    BACKWARD_BEFORE_BOUNDARY = "a backward operator before the loss boundary"
    READ_ABSENT = "reads a tensor that is absent"
    READ_ON_HOST = "reads a tensor that is on the host only"
    READ_AFTER_UPDATE = "reads a parameter that the step has updated already"
    COMPUTED_WHILE_LIVE = "produces a tensor that is already live"
    IN_PLACE = "computes in place what cannot be"
    FREED_ABSENT = "frees a tensor that is not live"
    RESULT_FREED = "frees a result of the step"
    SWAP_OUT_ABSENT = "swaps out a tensor that is not live"
    SWAP_OUT_TWICE = "swaps out a tensor whose host copy exists"
    SWAP_IN_ABSENT = "swaps in a tensor that has no host copy"
    SWAP_IN_WHILE_LIVE = "swaps in a tensor that is live"
    DROP_HOST_ABSENT = "drops a host copy that does not exist"
    HOME_DROPPED = "drops the host copy of a tensor that lives on the host"
    HOST_READ_ABSENT = "updates on the host by a gradient that has no host copy"
    UPDATED_IN_BOTH = "updates on the host what is on the device, too"
    CHANGE_LOST = "frees a tensor whose new value is not on the host"
    CHANGED_WHILE_COPIED = "updates a tensor that is being copied to the host"
    RESULT_MISSING = "a result is missing"
    LEFT_ON_DEVICE = "a tensor is left on the device"
    NOT_LEFT = "a tensor is on the device with a new value when the step begins, not when it ends"
    LEFT_ON_HOST = "a host copy is left"
    UNFINISHED = "the schedule ends too early"
    OVER_BUDGET = "device memory exceeds the budget"
    OVER_HOST_BUDGET = "host memory exceeds its budget"
    OFFSET_STRAY = "an offset for something that is not computed or swapped in there"
    OFFSET_REPEATED = "two offsets for one lifetime"
    OFFSET_NEGATIVE = "a negative offset"
    OFFSET_MISSING = "a lifetime without an offset"
    ADDRESSES_OVERLAP = "two tensors share addresses while both are live"
    ARENA_OVER_BUDGET = "the arena and what lies outside it exceed the budget"


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a program, and its place.

    Attributes:
        code: the kind of violation.
        instruction: position in the program or schedule; its length for a violation at the end.
        message: one line for people, naming the operators and tensors.
    """

    code: ViolationCode
    instruction: int
    message: str

    def __str__(self) -> str:
        return f"instruction {self.instruction}: {self.code}: {self.message}"


def first(found: list[Violation]) -> Violation | None:
    """Return the violation met first when the program is read from its start; None if none."""
    return min(found, key=lambda violation: violation.instruction, default=None)
