"""The lifetimes of a program's tensors: one walk for the order and for the addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, LossBoundary, Program, SwapIn, SwapOut


@dataclass(eq=False)
class Lifetime:
    """One tensor on the device, from the instruction `begin` until before `end`.

    Attributes:
        begin: the Compute, SwapIn or LossBoundary that makes it.
        tensor: the tensor.
        end: its Free, or the Compute that overwrites it; the length of the program if it stays.
        transient: whether its operator writes it and the program does not keep it.
        overwrites: the lifetime whose storage it takes over, computed in place.
        readers: the Computes that read it and the SwapOuts that copy it, ascending.
        copied: whether a SwapOut copies it, for which its Free waits.
        stays: whether nothing ends it.
        overwritten: whether it ends where another tensor takes over its storage.
    """

    begin: int
    tensor: int
    end: int
    transient: bool = False
    overwrites: Lifetime | None = None
    readers: list[int] = field(default_factory=list)
    copied: bool = False
    overwritten: bool = False

    stays: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """(instruction, tensor), as in `Program.offsets`."""
        return self.begin, self.tensor


@dataclass(frozen=True, slots=True)
class Storage:
    """Lifetimes that have one storage: each but the first is computed in place of the last."""

    lifetimes: tuple[Lifetime, ...]

    @property
    def first(self) -> Lifetime:
        """The lifetime that begins it."""
        return self.lifetimes[0]

    @property
    def end(self) -> int:
        """The first instruction at which it is not needed any more."""
        return self.lifetimes[-1].end

    @property
    def id(self) -> str:
        """The id of its `Buffer`: "instruction:tensor" of the first lifetime."""
        return f"{self.first.begin}:{self.first.tensor}"


def lifetimes(graph: Graph, program: Program) -> list[Lifetime]:
    """Every lifetime of a valid program in the order of their beginnings, tangents included."""
    found: list[Lifetime] = []
    live: dict[int, Lifetime] = {}

    def begin(position: int, tensor: int, overwrites: Lifetime | None = None) -> None:
        live[tensor] = Lifetime(position, tensor, len(program), overwrites=overwrites)
        found.append(live[tensor])

    for position, instruction in enumerate(program):
        if isinstance(instruction, Compute):
            chosen = variant(graph.operators[instruction.op], instruction.implementation)
            for tensor in dict.fromkeys(chosen.reads):
                if tensor in live:
                    live[tensor].readers.append(position)
            taken = None if instruction.in_place is None else live.pop(instruction.in_place)
            if taken is not None:
                taken.end, taken.overwritten, taken.stays = position, True, False
            for tensor in chosen.writes:
                if tensor in instruction.outputs:
                    begin(position, tensor, taken if tensor == chosen.writes[0] else None)
                else:
                    found.append(
                        Lifetime(position, tensor, position + 1, transient=True, stays=False)
                    )
        elif isinstance(instruction, SwapIn):
            begin(position, instruction.tensor)
        elif isinstance(instruction, LossBoundary):
            for tensor in graph.tangents:
                begin(position, tensor)
        elif isinstance(instruction, SwapOut):
            live[instruction.tensor].readers.append(position)
            live[instruction.tensor].copied = True
        elif isinstance(instruction, Free):
            freed = live.pop(instruction.tensor)
            freed.end, freed.stays = position, False
    return found


def storages(listed: Sequence[Lifetime]) -> tuple[Storage, ...]:
    """The storages of lifetimes, in the order of their beginnings and then of their tensors."""
    chains: dict[Lifetime, list[Lifetime]] = {}
    for lifetime in listed:
        chain = [] if lifetime.overwrites is None else chains.pop(lifetime.overwrites)
        chains[lifetime] = [*chain, lifetime]
    found = [Storage(tuple(chain)) for chain in chains.values()]
    return tuple(sorted(found, key=lambda storage: storage.first.key))
