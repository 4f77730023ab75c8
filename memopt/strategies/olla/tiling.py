"""Placements that leave no byte free: which are sought, restarts and limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from memopt.programs.lifetimes import live_bytes
from memopt.strategies.olla.buffers import Buffer, Ints, Layout
from memopt.strategies.olla.joined_buffers import JoinedBuffers
from memopt.strategies.olla.search import Outcome, luby

if TYPE_CHECKING:
    from memopt.strategies.olla.tiling_levels import Ground

ALONE = 6
"""Every so many rounds the buffers are searched as they are."""
SMALL = 60
"""So few buffers are searched as they are first."""
ROUND_NODES, ATTEMPT_NODES, MOST_ATTEMPT_NODES = 8000, 1000, 16_000
"""Nodes of the first such rounds, of the shortest attempts of a round, and of the longest."""
JOIN_NODES, CHUNK_NODES, NODE_STEPS = 12_000, 1500, 25
"""Nodes of the shortest round with joined buffers, of the search for better joins before the pieces
are looked at again, and steps of that search that take as long as a node."""
CORE_NODES, FEW_NODES, FEW_PIECES = 2000, 500, 70
"""Nodes of the search for a tiling of pieces, and with more pieces than that."""
CORE_SHARE = 5
"""It takes one such part of a round, about; what is left at the end is always searched."""
SLOTS = 1 << 18
"""Sets of buffers that are remembered as failed."""
MOST_BUFFERS = 2000


def is_tiling(layout: Layout) -> bool:
    """Whether a placement of the bound's size can leave no byte free at any time."""
    full = bool((layout.section_bytes == layout.bound).all())
    return (
        full and len(layout) <= MOST_BUFFERS and bool((layout.size % layout.alignment == 0).all())
    )


def find_tiling(
    layout: Layout, *, seed: int, node_limit: int, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Search for a placement of the bound's size of buffers that `is_tiling`.

    Rounds join buffers by guesses and search what is left, or take the buffers as they are, which
    can prove that there is none.

    Args:
        layout: buffers of positive size.
        seed: of the random choices.
        node_limit: nodes in all.
        stop: looked at every few tenths of a second.
    """
    rng = np.random.default_rng((seed, 1))
    alone, nodes = _Rounds(layout, rng), 0
    for turn in itertools.count(1):
        left = node_limit - nodes
        if left <= 0 or stop():
            break
        if turn % ALONE == 0 or (turn == 1 and len(layout) <= SMALL):
            outcome = alone.search(min(left, ROUND_NODES * (1 + turn // ALONE)), stop)
        else:
            limit = JOIN_NODES * luby(turn - turn // ALONE)
            outcome = _search_joined(layout, rng, min(left, limit), stop)
        nodes += max(outcome.nodes, 1)
        if outcome.infeasible:
            return Outcome(None, True, nodes, 0)
        if outcome.offsets is not None:
            fits = bool((outcome.offsets % layout.alignment == 0).all())
            return Outcome(outcome.offsets if fits else None, False, nodes, 0)
    return Outcome(None, False, nodes, 0)


def _search_joined(
    layout: Layout, rng: np.random.Generator, node_limit: int, stop: Callable[[], bool]
) -> Outcome:
    """Join buffers, better and better, and search for tilings of the pieces; proves nothing."""
    joined = JoinedBuffers(layout.size, layout.first, layout.last, rng)
    nodes, tried = 0, None
    while True:
        pieces, spent = joined.pieces(), nodes + joined.work // NODE_STEPS
        over = joined.all_joined or spent + CHUNK_NODES > node_limit
        if pieces != tried and (over or CORE_SHARE * nodes <= spent):
            tried = pieces
            merged = Layout([Buffer(str(i), p.first, p.last, p.size) for i, p in enumerate(pieces)])
            limit = FEW_NODES if len(pieces) > FEW_PIECES else CORE_NODES
            outcome = _Rounds(merged, rng).search(min(limit, node_limit - nodes), stop)
            nodes += outcome.nodes
            if outcome.offsets is not None:
                offsets = np.empty(len(layout), dtype=np.int64)
                for piece, ground in zip(pieces, outcome.offsets.tolist(), strict=True):
                    for buffer, offset in piece.above(ground):
                        offsets[buffer] = offset
                return Outcome(offsets, False, nodes + joined.work // NODE_STEPS, 0)
        left = node_limit - nodes - joined.work // NODE_STEPS
        if left <= 0 or joined.all_joined or stop():
            return Outcome(None, False, node_limit - max(left, 0), 0)
        joined.improve(min(left, CHUNK_NODES) * NODE_STEPS)


class _Rounds:
    """Restarts on one set of buffers; what failed is remembered from one to the next."""

    def __init__(self, layout: Layout, rng: np.random.Generator) -> None:
        from memopt.strategies.olla import tiling_kernels as kernels
        from memopt.strategies.olla import tiling_levels as levels

        self.layout, self.rng, self.attempt = layout, rng, 0
        count, sections = len(layout), layout.sections
        start_at, starts, start_bit = _by_boundary(layout.first, sections)
        end_at, ends, end_bit = _by_boundary(layout.last, sections)
        self.tiling = levels.Tiling(
            layout.size, layout.first, layout.last, layout.twins,
            start_at, starts, end_at, ends, start_bit, end_bit,
            rng.integers(1, 1 << 62, count),
        )  # fmt: skip
        self.search_state = levels.Search(
            preference=np.zeros(count),
            weight=np.ones(sections),
            failed=np.zeros(SLOTS, dtype=np.int64),
            ends_only=np.zeros(1, dtype=np.int64),
            level=np.zeros((count + 2, kernels.LEVEL_FIELDS), dtype=np.int64),
            parts=np.empty((count + sections + 2, 3), dtype=np.int64),
            trail=np.empty((4 * (count + sections) + 16, 3), dtype=np.int64),
            options=np.empty(count * (count + 1), dtype=np.int64),
            chosen=np.empty(count, dtype=np.int64),
            scratch=np.empty((3, sections + 1), dtype=np.int64),
            sums=np.empty((2, 2 << levels.MOST_SUBSETS), dtype=np.int64),
            masks=np.empty((2, 2 << levels.MOST_SUBSETS), dtype=np.int64),
        )

    def search(self, node_limit: int, stop: Callable[[], bool]) -> Outcome:
        """Restarts until a limit, with random preferences, every other one from the ends of
        valleys only."""
        from memopt.strategies.olla.tiling_kernels import EXHAUSTED, FOUND, search_tiling

        layout, nodes = self.layout, 0
        while nodes < node_limit and not (nodes and stop()):
            self.attempt += 1
            limit = min(ATTEMPT_NODES * luby(self.attempt), MOST_ATTEMPT_NODES, node_limit - nodes)
            of_span, of_size = self.rng.uniform(-0.3, 1, 2)
            self.search_state.preference[:] = (
                of_span * np.log(layout.last - layout.first)
                + of_size * np.log(layout.size)
                + self.rng.random(len(layout)) * self.rng.choice((0.0, 0.3, 1.0))
            )
            self.search_state.ends_only[0] = self.attempt % 2
            ground = self._ground()
            code, tried = search_tiling(self.tiling, ground, self.search_state, layout.bound, limit)
            nodes += tried
            if code in (FOUND, EXHAUSTED):
                found = ground.offset if code == FOUND else None
                return Outcome(found, code == EXHAUSTED, nodes, 0)
        return Outcome(None, False, nodes, 0)

    def _ground(self) -> Ground:
        """Nothing placed."""
        from memopt.strategies.olla.tiling_levels import Ground

        layout, sections = self.layout, self.layout.sections
        ones = np.ones(len(layout), dtype=np.int64)
        crossing = live_bytes(layout.first, layout.last - 1, ones, sections)
        return Ground(
            offset=np.full(len(layout), -1, dtype=np.int64),
            floor=np.zeros(sections, dtype=np.int64),
            crossing=np.concatenate(([0], crossing)),
            starts_allowed=np.full(sections + 1, -1, dtype=np.int64),
            ends_allowed=np.full(sections + 1, -1, dtype=np.int64),
        )


def _by_boundary(at: Ints, sections: int) -> tuple[Ints, Ints, Ints]:
    """(start, buffer: boundary k has buffer[start[k]:start[k+1]]; the position of each there)."""
    order = np.argsort(at, kind="stable")
    start = np.searchsorted(at[order], np.arange(sections + 2))
    position = np.empty_like(order)
    position[order] = np.arange(len(at)) - start[at[order]]
    return start, order, position
