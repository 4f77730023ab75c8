"""Collectives under way in generated code: started by their call, waited for by `wait_tensor`."""

from __future__ import annotations

from torch.fx import Node

from memopt.step.build import Lowering


class UnderWay:
    """The collectives that have started and that nothing has waited for yet.

    A wait comes before the first reader of a result, and before the memory of what a collective
    reads or writes is given back or taken over, as `memopt.programs.replay` has it.
    """

    def __init__(self, lowering: Lowering, before: UnderWay | None = None) -> None:
        self._lowering = lowering
        self._reads: dict[int, tuple[int, ...]] = {} if before is None else dict(before._reads)
        self._of: dict[int, int] = {} if before is None else dict(before._of)
        """Result → the operator that writes it."""

    def start(self, op: int, results: tuple[int, ...]) -> None:
        """An operator ran, of which the program keeps `results`."""
        operator = self._lowering.graph.operators[op]
        if operator.collective is not None:
            self._reads.update(dict.fromkeys(results, operator.reads))
            self._of.update(dict.fromkeys(results, op))

    def waited(self, wait: Node) -> tuple[int, ...]:
        """The code waits at this node: what its collective reads and writes, if it was under
        way."""
        (result,) = self._lowering.storages[wait]
        assert result is not None
        reads = self._reads.pop(result, None)
        return () if reads is None else (result, *reads)

    def beside(self, wait: Node) -> list[int]:
        """Other results, under way, of the collective that the code waits for at this node: as long
        as one is, all that it read and wrote is held."""
        (result,) = self._lowering.storages[wait]
        if result not in self._reads:
            return []
        return [t for t in self._reads if t != result and self._of[t] == self._of[result]]

    def take(self, tensor: int) -> list[tuple[int, tuple[int, ...]]]:
        """Of those that read or write a tensor, to be waited for now, the result, and all that
        each reads and writes."""
        found = [t for t, reads in self._reads.items() if tensor == t or tensor in reads]
        return [(result, (result, *self._reads.pop(result))) for result in found]
