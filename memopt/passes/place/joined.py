"""Search for a placement within a capacity by joining buffers that fit together exactly.

Free space at a capacity is filled with pretended buffers (fillers): where live bytes rise by as
many as they fell before, one is missing between. So every section is full, and sizes that add up
are seldom chance: if the buffer that begins at some instant has the size of the one that ends
there, it most likely follows at the same offset. Buffers are joined, bottom up, into rectangles of
time and memory (`join_kernels.py`). The depth-first search places these: often a few dozen, without
a wrong turn. While it fails, a local search dissolves some joins and makes others
(`rejoin_kernels.py`).

Fillers and joins are guesses. They may exclude every placement, so nothing is proved with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memopt.passes.place.buffers import Buffer, Ints, Layout
from memopt.passes.place.search import Outcome, find_placement, luby

if TYPE_CHECKING:
    from memopt.passes.place.join_kernels import Forest, Scratch

MOST_BUFFERS = 2000
ROUND_WORK = 70_000_000
"""Work of the shortest round, which joins all anew."""
STEP_WORK = 240
"""Units of work that a step of joining counts as."""
CHUNK_STEPS = 37_500
"""Steps of the search for better joins before the pieces are placed again."""
CORE_WORK = 5_000_000
"""Work to place pieces once."""
RECENT, MOST_ADDED = 12, 3
"""The latest fillers that may end where live bytes rise, and the most that end there together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle: sections first to last (excluded), bytes, and its parts."""

    first: int
    last: int
    size: int
    parts: tuple[tuple[int, int], ...]
    """(buffer, its height above the rectangle's lowest address)."""


def find_joined(
    layout: Layout,
    capacity: int,
    *,
    seed: int = 0,
    turn: int = 0,
    work_limit: int,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Search for a placement of peak ≤ `capacity` bytes; proves nothing.

    Args:
        layout: buffers of positive size, the largest live set within the capacity.
        capacity: bytes.
        seed: of the random choices.
        turn: how often this was tried before.
        work_limit: units of work in all.
        stop: looked at every few tenths of a second.
    """
    capacity -= capacity % layout.unit
    rng = np.random.default_rng((seed, turn, 1))
    nodes = work = 0
    for attempt in itertools.count(1):
        left = work_limit - work
        if left <= 0 or stop() or len(layout) > MOST_BUFFERS:
            break
        filled = fillers(layout, capacity, rng if attempt > 1 else None)
        added = np.array(filled, dtype=np.int64).reshape(-1, 3)
        first, last, size = (
            np.concatenate((column, added[:, k]))
            for k, column in enumerate((layout.first, layout.last, layout.size))
        )
        limit = min(left, ROUND_WORK * luby(attempt))
        outcome = _search_and_improve(
            layout, capacity, JoinedBuffers(first, last, size, rng), limit, stop
        )
        nodes, work = nodes + outcome.nodes, work + max(outcome.work, 1)
        if outcome.offsets is not None:
            return Outcome(outcome.offsets, False, nodes, work)
    return Outcome(None, False, nodes, work)


def _search_and_improve(
    layout: Layout,
    capacity: int,
    joined: JoinedBuffers,
    work_limit: int,
    stop: Callable[[], bool],
) -> Outcome:
    """Search for a placement of the joined pieces, then look for better joins, in turn, until a
    placement is found or the work is spent."""
    nodes, searched, tried = 0, 0, None
    while True:
        pieces = [piece for piece in joined.pieces() if piece.parts[0][0] < len(layout)]
        if pieces != tried:
            tried = pieces
            outcome = find_placement(
                _as_layout(layout, pieces), capacity,
                work_limit=min(CORE_WORK, work_limit), stop=stop,
            )  # fmt: skip
            nodes, searched = nodes + outcome.nodes, searched + outcome.work
            if outcome.offsets is not None:
                offsets = np.zeros(len(layout), dtype=np.int64)
                for piece, ground in zip(pieces, outcome.offsets.tolist(), strict=True):
                    for buffer, height in piece.parts:
                        if buffer < len(layout):
                            offsets[buffer] = ground + height
                if bool((offsets % layout.alignment == 0).all()):
                    return Outcome(offsets, False, nodes, searched + joined.steps * STEP_WORK)
        work = searched + joined.steps * STEP_WORK
        if work >= work_limit or joined.all_joined or stop():
            return Outcome(None, False, nodes, work)
        joined.improve(min(CHUNK_STEPS, 1 + (work_limit - work) // STEP_WORK))


def _as_layout(layout: Layout, pieces: list[Piece]) -> Layout:
    """Return the pieces as buffers, aligned as their parts are."""
    steps = [*layout.alignment.tolist()] + [1] * sum(len(piece.parts) for piece in pieces)
    return Layout(
        [
            Buffer(str(k), p.first, p.last, p.size, max(steps[buffer] for buffer, _ in p.parts))
            for k, p in enumerate(pieces)
        ]
    )


def fillers(
    layout: Layout, capacity: int, rng: np.random.Generator | None = None
) -> list[tuple[int, int, int]]:
    """Guess the fillers that make every section full: (first section, end of sections, bytes).

    A filler begins where the free bytes rise. Where they fall, the fewest fillers of together as
    many bytes end; failing that, the youngest ones, in parts.

    Args:
        layout: the largest live set within the capacity.
        capacity: bytes.
        rng: draws among those of equal number; None: the last to begin ends first.
    """
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []
    free = [*(capacity - layout.section_bytes).tolist(), 0]
    for section, (before, now) in enumerate(itertools.pairwise([0, *free])):
        if now > before:
            open_.append((section, now - before))
        rest = before - now
        if rest <= 0:
            continue
        recent = list(range(len(open_)))[: -RECENT - 1 : -1]
        if rng is not None:
            rng.shuffle(recent)
        ending = next(
            (
                chosen
                for count in range(1, MOST_ADDED + 1)
                for chosen in itertools.combinations(recent, count)
                if sum(open_[k][1] for k in chosen) == rest
            ),
            (),
        )
        found += [(open_[k][0], section, open_[k][1]) for k in ending]
        open_ = [one for k, one in enumerate(open_) if k not in ending]
        rest = 0 if ending else rest
        while rest > 0:
            begin, size = open_.pop()
            found.append((begin, section, min(size, rest)))
            if size > rest:
                open_.append((begin, size - rest))
            rest -= min(size, rest)
    return found


class JoinedBuffers:
    """Buffers joined as far as sizes suggest, and the search for better joins.

    Args:
        first, last, size: of the buffers, which leave no byte free in any section.
        rng: of the random choices.
    """

    def __init__(self, first: Ints, last: Ints, size: Ints, rng: np.random.Generator) -> None:
        from memopt.passes.place import join_kernels as kernels
        from memopt.passes.place.rejoin_kernels import rejoin

        count, boundaries = len(size), int(last.max()) + 1
        piece = np.full((kernels.ROWS, 2 * count), -1, dtype=np.int64)
        piece[:3, :count] = first, last, size
        piece[kernels.CODE, :count] = rng.integers(1, 1 << 62, count)
        piece[kernels.SIBLING, count:] = [*range(count + 1, 2 * count), -1]
        self.forest = kernels.Forest(
            piece=piece,
            head=np.full((2, boundaries), -1, dtype=np.int64),
            due=np.full(boundaries, kernels.NEVER),
            tally=np.array([0, count], dtype=np.int64),
        )
        for buffer in range(count):
            kernels.show(self.forest, buffer)
        self.scratch = _scratch(2 * count, int(rng.integers(1, 1 << 31)))
        rejoin(self.forest, self.scratch)
        self.kept: Forest = deepcopy(self.forest)
        self.best: Forest = deepcopy(self.forest)

    @property
    def steps(self) -> int:
        """Return the work done so far, in steps of about half a microsecond."""
        return int(self.scratch.work[0])

    @property
    def all_joined(self) -> bool:
        """Tell whether all pieces live all the time."""
        return int(self.best.tally[0]) == 0

    def improve(self, steps: int) -> None:
        """Search for better joins."""
        from memopt.passes.place.rejoin_kernels import improve

        improve(self.forest, self.kept, self.best, self.scratch, steps)

    def pieces(self) -> list[Piece]:
        """Return the fewest pieces so far, each with its parts by number."""
        from memopt.passes.place import join_kernels as kernels

        first, last, size = self.best.piece[:3].tolist()
        after = self.best.piece[kernels.NEXT].tolist()
        pieces = []
        for head in self.best.head[kernels.FIRST].tolist():
            while head >= 0:
                pieces.append(Piece(first[head], last[head], size[head], self._parts(head)))
                head = after[head]
        return pieces

    def _parts(self, top: int) -> tuple[tuple[int, int], ...]:
        """Return (buffer, height) of all buffers in a piece."""
        from memopt.passes.place import join_kernels as kernels

        rows, parts, todo = self.best.piece, [], [(top, 0)]
        while todo:
            piece, height = todo.pop()
            part = int(rows[kernels.CHILD, piece])
            if part < 0:
                parts.append((piece, height))
            groups: list[list[int]] = [[] for _ in range(kernels.GROUPS)]
            while part >= 0:
                groups[int(rows[kernels.GROUP, part])].append(part)
                part = int(rows[kernels.SIBLING, part])
            low, middle = (int(rows[kernels.SIZE, group].sum()) for group in groups[:2])
            for group, ground in zip(groups, (0, low, low + middle, 0, low), strict=True):
                for one in group:
                    todo.append((one, height + ground))
                    ground += int(rows[kernels.SIZE, one])
        return tuple(sorted(parts))


def _scratch(most: int, seed: int) -> Scratch:
    """Make the scratch arrays of the search for joins."""
    from memopt.passes.place import join_kernels as kernels

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    groups, most_stacks = kernels.GROUPS, kernels.STACKS
    return kernels.Scratch(
        random=np.array([seed], dtype=np.int64), work=zeros(1), pieces=zeros(groups, most),
        stacks=zeros(groups), height=zeros(groups, most_stacks), members=zeros(groups, most_stacks),
        base=zeros(groups, most_stacks), many=zeros(groups, most_stacks),
        far=zeros(groups, most_stacks),
        slot=zeros(kernels.SLOTS), same_slot=zeros(most_stacks), taken=zeros(groups),
        parts=zeros(2, kernels.MOST_PARTS), groups=zeros(2, kernels.MOST_PARTS), span=zeros(4),
        forbidden=zeros(1),
    )  # fmt: skip
