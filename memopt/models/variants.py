"""The figures of an operator under one of its implementations, which a Compute chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memopt.errors import InvalidProgramError
from memopt.models.graph import Implementation, Operator


@dataclass(frozen=True, slots=True)
class Variant:
    """The figures of an operator under one of its implementations (MONeT §3).

    Attributes:
        reads: indices of the tensors it reads.
        writes: indices of the tensors it writes.
        time_s: seconds.
        workspace_bytes: peak during the call minus its outputs, bytes.
        in_place: tensors whose storage its first output may take over.
        on_host: as in `Implementation`.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_s: float
    workspace_bytes: int
    in_place: tuple[int, ...] = ()
    on_host: bool = False

    @classmethod
    def of(cls, figures: Operator | Variant) -> Variant:
        """Make a Variant with these figures."""
        return cls(
            figures.reads,
            figures.writes,
            figures.time_s,
            figures.workspace_bytes,
            figures.in_place,
            figures.on_host,
        )

    def as_good_as(self, other: Variant) -> bool:
        """Return whether it can replace the other at no cost in time or memory."""
        return (
            self.on_host == other.on_host
            and set(self.reads) <= set(other.reads)
            and set(self.writes) == set(other.writes)
            and self.time_s <= other.time_s
            and self.workspace_bytes <= other.workspace_bytes
            and set(self.in_place) >= set(other.in_place)
        )


def variant(operator: Operator, implementation: str | None) -> Operator | Variant:
    """Return reads, writes, time_s, workspace_bytes, in_place of `operator` under `implementation`.

    None is the operator's own, default implementation.

    Raises:
        InvalidProgramError: the operator has no implementation of that name.
    """
    if implementation is None:
        return operator
    for choice in operator.implementations:
        if choice.name == implementation:
            return Variant(
                operator.reads if choice.reads is None else choice.reads,
                operator.writes if choice.writes is None else choice.writes,
                choice.time_s,
                choice.workspace_bytes,
                choice.in_place,
                choice.on_host,
            )
    raise InvalidProgramError(
        f"operator {operator.name!r} has no implementation {implementation!r}"
    )


def leanest(operator: Operator, needed: Iterable[int], sizes: Sequence[int]) -> str | None:
    """Return the implementation of least memory for a run of which only some results are needed. It
    is exact, as fast as the default one, and reads nothing else. None: the default one."""
    if not operator.implementations:
        return None
    wanted = frozenset(needed)
    best, least = None, sum(sizes[t] for t in operator.writes) + operator.workspace_bytes
    for choice in operator.implementations:
        run = variant(operator, choice.name)
        if not choice.exact or choice.on_host or run.time_s > operator.time_s:
            continue
        if wanted.issubset(run.writes) and set(run.reads) <= set(operator.reads):
            size = sum(sizes[t] for t in run.writes) + run.workspace_bytes
            if size < least:
                best, least = choice.name, size
    return best


def undominated(
    operator: Operator, resident: frozenset[int] = frozenset()
) -> tuple[Implementation, ...]:
    """Return the implementations that neither the default nor another one dominates: each other one
    that writes the same is slower, needs more scratch memory or other operands, or is less exact.

    Args:
        operator: with its implementations.
        resident: tensors that are live in any case, so that reading them costs nothing.
    """
    kept: list[Implementation] = []
    known: list[tuple[Variant, bool]] = []
    for name, exact in ((None, True), *((c.name, c.exact) for c in operator.implementations)):
        figures = Variant.of(variant(operator, name))
        reads = tuple(t for t in figures.reads if t not in resident)
        known.append((replace(figures, reads=reads), exact))
    for position, choice in enumerate(operator.implementations, start=1):
        own, exact = known[position]
        others = (
            other
            for n, (other, precise) in enumerate(known)
            if n != position
            and (precise or not exact)
            and other.as_good_as(own)
            # Of two equal ones the first stays.
            and (n < position or not own.as_good_as(other) or (exact and not precise))
        )
        if next(others, None) is None:
            kept.append(choice)
    return tuple(kept)
