"""The instruction set of a plan: one for every strategy (docs/cost-model.md).

An instruction's effects on tensors are defined once, in its `effects`. Code that uses these need
not know the kinds of instructions; only replay, the validator, the generated code, the
interpreter and files do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple, TypeAlias

from memopt.models.codec import NAME, SPARSE, Columns, TaggedRows
from memopt.models.graph import Graph
from memopt.models.variants import variant


class Effects(NamedTuple):
    """The effects of one instruction on the tensors of a graph.

    Attributes:
        reads: tensors whose device copy it reads.
        writes: tensors for which it takes device memory.
        begins: those of `writes` that stay live after it; the others are transient.
        ends: tensors whose device copy ends with it.
        overwrites: the one of `ends` whose memory the first of `writes` takes over.
        workspace_bytes: device memory beside all tensors while it runs.
        host_begins: tensors that it copies to the host.
        host_ends: tensors whose host copy ends with it.
    """

    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    overwrites: int | None = None
    workspace_bytes: int = 0
    host_begins: tuple[int, ...] = ()
    host_ends: tuple[int, ...] = ()

    @property
    def touches(self) -> set[int]:
        """Every tensor that it names, reads or writes."""
        return {*self.reads, *self.writes, *self.ends, *self.host_begins, *self.host_ends}


class _Named:
    __slots__ = ()

    def label(self, graph: Graph) -> str:
        """Return the operator that it runs, or else its own name, for people."""
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class Compute(_Named):
    """Run operator `op`; of its written tensors keep `outputs`, the others are transient.

    A second Compute of the same operator recomputes it. With `in_place`, one of the tensors in
    the operator's or implementation's `in_place`, the first tensor that it writes takes over that
    tensor's storage, and that tensor's lifetime ends here.
    """

    op: int
    outputs: tuple[int, ...]
    implementation: str | None = None
    in_place: int | None = field(default=None, metadata=SPARSE)

    def label(self, graph: Graph) -> str:
        return graph.operators[self.op].name

    def effects(self, graph: Graph) -> Effects:
        chosen = variant(graph.operators[self.op], self.implementation)
        ends = () if self.in_place is None else (self.in_place,)
        scratch = 0 if chosen.on_host else chosen.workspace_bytes
        return Effects(chosen.reads, chosen.writes, self.outputs, ends, self.in_place, scratch)


@dataclass(frozen=True, slots=True)
class OfTensor(_Named):
    """An instruction that names one tensor, which is not resident, or movable
    (`memopt.programs.moved`)."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Free(OfTensor):
    """Drop the device copy of a tensor. Waits for its swap-out, if one is under way."""

    def effects(self, graph: Graph) -> Effects:
        return Effects(ends=(self.tensor,))


@dataclass(frozen=True, slots=True)
class SwapOut(OfTensor):
    """Start copying a tensor to the host. The device copy stays until its Free."""

    def effects(self, graph: Graph) -> Effects:
        return Effects(reads=(self.tensor,), host_begins=(self.tensor,))


@dataclass(frozen=True, slots=True)
class SwapIn(OfTensor):
    """Start copying a tensor back; it occupies device memory from here on. The first reader
    waits for the copy. The host copy stays until its DropHost."""

    def effects(self, graph: Graph) -> Effects:
        return Effects(writes=(self.tensor,), begins=(self.tensor,))


@dataclass(frozen=True, slots=True)
class DropHost(OfTensor):
    """Drop the host copy of a tensor."""

    def effects(self, graph: Graph) -> Effects:
        return Effects(host_ends=(self.tensor,))


@dataclass(frozen=True, slots=True)
class LossBoundary(_Named):
    """The forward ends, new values are written back to buffers, the user's loss runs, the tangents
    arrive. Exactly one in a program with backward operators."""

    def effects(self, graph: Graph) -> Effects:
        return Effects(
            reads=graph.written_back,
            writes=graph.tangents,
            begins=graph.tangents,
            ends=graph.written_back,
            workspace_bytes=graph.boundary_bytes,
        )


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
"""The rows of files: ["compute", operator, [outputs], implementation or null] and, if the output
takes over a storage, that tensor; ["loss"], ["free", tensor] and so on."""


@dataclass(frozen=True)
class Program:
    """A planned training step.

    Attributes:
        instructions: in the order of the compute stream.
        offsets: a placement, or None: for each Compute/SwapIn instruction index and tensor,
            the byte offset of that lifetime in the arena: ((instruction, tensor, offset), ...).
        unplaced: lifetimes that the placement leaves to the allocator, since placing them would
            enlarge the arena by more than they take: ((instruction, tensor), ...).
    """

    instructions: tuple[Annotated[Instruction, INSTRUCTIONS], ...]
    offsets: (
        tuple[Annotated[tuple[int, int, int], Columns("instruction", "tensor", "offset")], ...]
        | None
    ) = None
    unplaced: tuple[Annotated[tuple[int, int], Columns("instruction", "tensor")], ...] = field(
        default=(), metadata={**SPARSE, NAME: "apart"}
    )

    def __init__(
        self,
        instructions: Iterable[Instruction],
        offsets: Iterable[tuple[int, int, int]] | None = None,
        unplaced: Iterable[tuple[int, int]] = (),
    ) -> None:
        object.__setattr__(self, "instructions", tuple(instructions))
        object.__setattr__(self, "offsets", None if offsets is None else tuple(offsets))
        object.__setattr__(self, "unplaced", tuple(unplaced))

    @cached_property
    def computes(self) -> tuple[tuple[int, Compute], ...]:
        """Every Compute with its position."""
        return tuple((i, x) for i, x in enumerate(self.instructions) if isinstance(x, Compute))

    @cached_property
    def boundary(self) -> int | None:
        """Position of the loss boundary; None: there is none."""
        found = (i for i, x in enumerate(self.instructions) if isinstance(x, LossBoundary))
        return next(found, None)

    @cached_property
    def has_transfers(self) -> bool:
        """Whether it copies anything to or from the host."""
        return any(isinstance(x, SwapOut | SwapIn) for x in self.instructions)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Positions of all instructions but frees, which need no more memory than the instruction
        before them."""
        return tuple(i for i, x in enumerate(self.instructions) if not isinstance(x, Free))

    @cached_property
    def steps_before(self) -> tuple[int, ...]:
        """For each position and for the end, the number of `steps` before it."""
        return tuple(bisect_left(self.steps, i) for i in range(len(self) + 1))

    def __len__(self) -> int:
        return len(self.instructions)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)
