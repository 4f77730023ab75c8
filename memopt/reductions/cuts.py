"""Finds where a forward graph can be cut into the stages of a chain.

A position p (between forward operators p-1 and p) is a cut if at most one storage is live across
it: written before p and read by a forward operator from p on. Resident storages do not count, nor
do those that a chain holds, and charges, for the whole step (`held`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from memopt.models.graph import Graph, TensorKind


@dataclass(frozen=True, slots=True)
class Cut:
    """A place to cut.

    Attributes:
        position: forward operators before it are in earlier stages.
        tensor: the storage that crosses it; None: no storage does, or only held ones.
    """

    position: int
    tensor: int | None


def parameter_free(graph: Graph) -> frozenset[int]:
    """Return storages computed in the forward with no parameter among their ancestors.

    Masks, rotary tables, position ids: every layer may read them, so they would forbid all cuts. If
    no forward operator reads a parameter, no storage counts as parameter-free.
    """
    dependent = {i for i, t in enumerate(graph.tensors) if t.kind is TensorKind.PARAMETER}
    free: set[int] = set()
    any_parameter = False
    for operator in graph.operators[: graph.first_backward]:
        if dependent.isdisjoint(operator.reads):
            free.update(operator.writes)
        else:
            any_parameter = True
            dependent.update(operator.writes)
    return frozenset(free) if any_parameter else frozenset()


def always_held(graph: Graph) -> frozenset[int]:
    """Return forward results that every plan keeps: those live to the end of the step, and those of
    operators that must not run twice."""
    held = set()
    for operator in graph.operators[: graph.first_backward]:
        for tensor in operator.writes:
            once = not operator.recomputable and bool(graph.readers[tensor])
            if once or tensor in graph.kept:
                held.add(tensor)
    return frozenset(held)


def last_forward_reader(graph: Graph, tensor: int) -> int:
    """Return the index of the last forward operator that reads the tensor; -1 if none does."""
    readers = graph.readers[tensor]
    count = bisect_left(readers, graph.first_backward)
    return readers[count - 1] if count else -1


def crossing(graph: Graph, cuts: Sequence[Cut], tensors: frozenset[int]) -> frozenset[int]:
    """Return those of the tensors that are live across at least one of the cuts."""
    count = graph.first_backward
    marks = [0] * (count + 1)
    for cut in cuts:
        marks[cut.position] = 1
    below = list(accumulate(marks))
    return frozenset(
        t
        for t in tensors
        if (last := last_forward_reader(graph, t)) > (first := graph.producer[t])
        and below[last] > below[first]
    )


class _Spans:
    """Counts, for a set of tensors, how many cross each position, and sums their indices."""

    def __init__(self, positions: int) -> None:
        self._count = [0] * (positions + 1)
        self._sum = [0] * (positions + 1)

    def add(self, tensor: int, first: int, last: int) -> None:
        """Add a tensor that operator `first` writes and operator `last` reads last."""
        if last > first:
            self._count[first + 1] += 1
            self._count[last + 1] -= 1
            self._sum[first + 1] += tensor
            self._sum[last + 1] -= tensor

    def totals(self) -> list[tuple[int, int]]:
        """Return (count, sum of indices) at every position."""
        return list(zip(accumulate(self._count), accumulate(self._sum), strict=True))


def long_lived(graph: Graph, max_span: int) -> frozenset[int]:
    """Return forward storages read more than `max_span` operators after they are written."""
    return frozenset(
        tensor
        for first, operator in enumerate(graph.operators[: graph.first_backward])
        for tensor in operator.writes
        if last_forward_reader(graph, tensor) - first > max_span
    )


def find_cuts(graph: Graph, skips: frozenset[int] = frozenset()) -> tuple[Cut, ...]:
    """Find all cuts, in order; of neighbours with the same storage only the first."""
    free, end = parameter_free(graph), graph.first_backward
    held = always_held(graph) | (skips - free)
    spans = {name: _Spans(end + 1) for name in ("plain", "free", "held")}
    for first, operator in enumerate(graph.operators[:end]):
        for tensor in operator.writes:
            name = "held" if tensor in held else "free" if tensor in free else "plain"
            spans[name].add(tensor, first, last_forward_reader(graph, tensor))
    plain, fresh, kept = (spans[name].totals() for name in ("plain", "free", "held"))
    cuts: list[Cut] = []
    previous = None
    for position in range(1, end):
        count, tensor = plain[position]
        # Where only parameter-free storages cross, no parameter has been used yet: no stage ends.
        if count > 1 or (count == 0 and fresh[position][0]):
            continue
        key = (count, tensor) if count else (0, *kept[position])
        if key != previous:
            cuts.append(Cut(position, tensor if count else None))
        previous = key
    return tuple(cuts)


def worthwhile(graph: Graph, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Drop cuts whose storage no backward operator reads, unless they are cheap.

    A chain keeps the output of every stage run by F_all. A cut at a storage that is not saved for
    the backward (batch norm's output or a sum before a ReLU) makes the chain need more memory than
    the graph. Such a cut stays if its storage is at most half of both neighbouring cuts' (before an
    upsampling), or an eighth of what each of its two sides saves.
    """
    saved = _saved_bytes_before(graph)
    kept: list[Cut] = []
    run: list[Cut] = []
    for cut in cuts:
        if cut.tensor is not None and not _saved(graph, cut.tensor):
            run.append(cut)
            continue
        kept.extend(_cheap(graph, saved, run, _last(kept), cut))
        run = []
        # Nothing crosses and nothing was saved before it: a stage of its own would be useless.
        if cut.tensor is not None or saved[cut.position] > saved[_last(kept).position]:
            kept.append(cut)
    kept.extend(_cheap(graph, saved, run, _last(kept), Cut(graph.first_backward, None)))
    return tuple(kept)


def _last(cuts: Sequence[Cut]) -> Cut:
    return cuts[-1] if cuts else Cut(0, None)


def _saved(graph: Graph, tensor: int) -> bool:
    readers = graph.readers[tensor]
    return bool(readers) and readers[-1] >= graph.first_backward


def _saved_bytes_before(graph: Graph) -> list[int]:
    """Sum, for each position, bytes written before it in the forward and read in the backward."""
    saved = (
        sum(graph.tensors[t].size_bytes for t in operator.writes if _saved(graph, t))
        for operator in graph.operators[: graph.first_backward]
    )
    return [0, *accumulate(saved)]


def _cheap(graph: Graph, saved: list[int], run: list[Cut], left: Cut, right: Cut) -> list[Cut]:
    """Select the cuts worth keeping from a run of unsaved ones between two others, in order."""
    if not run:
        return []
    middle = len(run) / 2
    best = min(range(len(run)), key=lambda i: (_bytes(graph, run[i]), abs(i + 0.5 - middle)))
    size, position = _bytes(graph, run[best]), run[best].position
    ends = [_bytes(graph, cut) for cut in (left, right) if cut.tensor is not None]
    sides = (saved[position] - saved[left.position], saved[right.position] - saved[position])
    if not (ends and 2 * size <= min(ends)) and 8 * size > min(sides):
        # A side that saves nothing tells nothing about the other cuts.
        others = [] if min(sides) else [*run[:best], *run[best + 1 :]]
        return _cheap(graph, saved, others, left, right)
    return [
        *_cheap(graph, saved, run[:best], left, run[best]),
        run[best],
        *_cheap(graph, saved, run[best + 1 :], run[best], right),
    ]


def _bytes(graph: Graph, cut: Cut) -> int:
    return 0 if cut.tensor is None else graph.tensors[cut.tensor].size_bytes
