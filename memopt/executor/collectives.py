"""Tracks collectives in generated code: started by their call, waited for by `wait_tensor`."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from memopt.step.build import Lowering


class UnderWay:
    """The collectives that have started and not been waited for yet.

    A wait precedes the first reader of a result. It also precedes the end or reuse of memory that a
    collective reads or writes, as in `memopt.programs.replay`.
    """

    def __init__(self, lowering: Lowering, before: UnderWay | None = None) -> None:
        self._lowering = lowering
        self._reads: dict[int, tuple[int, ...]] = {} if before is None else dict(before._reads)
        self._of: dict[int, int] = {} if before is None else dict(before._of)
        """Result → the operator that writes it."""

    def start(self, op: int, results: tuple[int, ...]) -> None:
        """Note that an operator has run and that the program keeps `results`."""
        operator = self._lowering.graph.operators[op]
        if operator.collective is not None:
            self._reads.update(dict.fromkeys(results, operator.reads))
            self._of.update(dict.fromkeys(results, op))

    def waited(self, wait: Node) -> tuple[int, ...]:
        """Note a wait for a collective; return the tensors that it read or wrote, () if it was not
        under way."""
        (result,) = self._lowering.storages[wait]
        assert result is not None
        reads = self._reads.pop(result, None)
        return () if reads is None else (result, *reads)

    def beside(self, wait: Node) -> list[int]:
        """Return other pending results of the collective that this node waits for: while one is
        pending, all tensors of the collective are held."""
        (result,) = self._lowering.storages[wait]
        if result not in self._reads:
            return []
        return [t for t in self._reads if t != result and self._of[t] == self._of[result]]

    def same(self, result: int, others: Iterable[int]) -> bool:
        """Return whether one of `others` is a result of the same collective."""
        return any(self._of[other] == self._of[result] for other in others)

    def pending(self, result: int) -> bool:
        """Return whether a result of the same collective has not been waited for."""
        return self.same(result, self._reads)

    def take(self, tensor: int) -> list[tuple[int, tuple[int, ...]]]:
        """Remove the pending results of collectives that use a tensor; return each with all tensors
        of its collective."""
        found = [t for t, reads in self._reads.items() if tensor == t or tensor in reads]
        return [(result, (result, *self._reads.pop(result))) for result in found]
