"""The instruction set of a plan: one for every strategy (docs/cost-model.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from memopt.models.codec import SPARSE, Row, TaggedRows


@dataclass(frozen=True, slots=True)
class Compute:
    """Run operator `op`; of its written tensors keep `outputs`, the others are transient.

    A second Compute of the same operator recomputes it. With `in_place`, one of the `in_place` of
    the operator or of the implementation, the first tensor that it writes takes over that tensor's
    storage, and the tensor ends here.
    """

    op: int
    outputs: tuple[int, ...]
    implementation: str | None = None
    in_place: int | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the device copy of a tensor. Waits for its swap-out, if one is under way."""

    tensor: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Start copying a tensor to the host. The device copy stays until its Free."""

    tensor: int


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Start copying a tensor back; it occupies device memory from here on. The first reader
    waits for the copy. The host copy stays until its DropHost."""

    tensor: int


@dataclass(frozen=True, slots=True)
class DropHost:
    """Drop the host copy of a tensor."""

    tensor: int


@dataclass(frozen=True, slots=True)
class LossBoundary:
    """The forward ends, the user's loss runs, the tangents arrive. Exactly one in a program
    with backward operators."""


Instruction: TypeAlias = Compute | Free | SwapOut | SwapIn | DropHost | LossBoundary

INSTRUCTIONS = TaggedRows(
    "an instruction",
    {
        "compute": Compute,
        "free": Free,
        "swap out": SwapOut,
        "swap in": SwapIn,
        "drop host": DropHost,
        "loss": LossBoundary,
    },
)
"""How they stand in files: ["compute", operator, [outputs], implementation or null] and, if the
output takes over a storage, that tensor; ["loss"], ["free", tensor] and so on."""


@dataclass(frozen=True)
class Program:
    """A planned training step.

    Attributes:
        instructions: in the order of the compute stream.
        offsets: a placement, or None: for each Compute/SwapIn instruction index and tensor,
            the byte offset of that lifetime in the arena: ((instruction, tensor, offset), ...).
        apart: lifetimes that the placement leaves to the allocator, which would make the arena
            larger than they are worth: ((instruction, tensor), ...).
    """

    instructions: tuple[Annotated[Instruction, INSTRUCTIONS], ...]
    offsets: (
        tuple[Annotated[tuple[int, int, int], Row("instruction", "tensor", "offset")], ...] | None
    ) = None
    apart: tuple[Annotated[tuple[int, int], Row("instruction", "tensor")], ...] = field(
        default=(), metadata=SPARSE
    )

    def __init__(
        self,
        instructions: Iterable[Instruction],
        offsets: Iterable[tuple[int, int, int]] | None = None,
        apart: Iterable[tuple[int, int]] = (),
    ) -> None:
        object.__setattr__(self, "instructions", tuple(instructions))
        object.__setattr__(self, "offsets", None if offsets is None else tuple(offsets))
        object.__setattr__(self, "apart", tuple(apart))

    def __len__(self) -> int:
        return len(self.instructions)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)
