"""What one Compute really runs: the operator's own figures or those of an implementation."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.errors import InvalidProgramError
from memopt.models.graph import Operator


@dataclass(frozen=True, slots=True)
class Variant:
    """The figures of an operator under one of its implementations (MONeT §3).

    Attributes:
        reads: indices of the tensors it reads.
        writes: indices of the tensors it writes.
        time_s: seconds.
        workspace_bytes: peak during the call minus its outputs, bytes.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_s: float
    workspace_bytes: int


def variant(operator: Operator, implementation: str | None) -> Operator | Variant:
    """The reads, writes, time_s and workspace_bytes of `operator` under `implementation`.

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
            )
    raise InvalidProgramError(
        f"operator {operator.name!r} has no implementation {implementation!r}"
    )
