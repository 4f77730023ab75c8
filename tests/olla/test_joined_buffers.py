"""Joined buffers on tilings of a dozen buffers: what the look-out finds is the best of all joins,
a forest stays whole, and what is undone is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations, product
from random import Random
from typing import TypeAlias

import numpy as np
import pytest

from memopt.strategies.olla import Buffer
from memopt.strategies.olla import join_choices as choices
from memopt.strategies.olla import join_kernels as kernels
from memopt.strategies.olla import join_search_kernels as searching
from memopt.strategies.olla.buffers import Layout
from memopt.strategies.olla.join_kernels import Forest
from memopt.strategies.olla.joined_buffers import JoinedBuffers, _forest, _scratch
from tests.olla.oracles import overlap
from tests.olla.test_tiling import filled_up

pytestmark = pytest.mark.xdist_group("address kernels")
"""In one worker: where nothing is compiled yet, two would take half a minute each for the same."""

Stack: TypeAlias = tuple[int, ...]
SPIRAL = [(0, 1, 3), (0, 2, 3), (1, 2, 2), (1, 3, 1), (2, 3, 5)]
"""Five buffers that no straight cut separates: (first section, end of sections, size)."""
SPLIT = [(0, 1, 1), (0, 1, 2), (0, 2, 1), (0, 2, 2), (1, 2, 2), (1, 3, 1), (2, 3, 1), (2, 3, 4)]
"""The same with stacks of two for three of them."""


def joined(lives: list[tuple[int, int, int]], seed: int = 0) -> JoinedBuffers:
    first, last, size = (np.array(column, dtype=np.int64) for column in zip(*lives, strict=True))
    return JoinedBuffers(size, first, last, np.random.default_rng(seed))


def small(seed: int) -> Layout:
    return Layout(filled_up(Random(seed)))


def around_a_spiral(seed: int) -> Layout:
    """A spiral of small stacks among random buffers."""
    rng = Random(seed)
    begin, near, far, end = sorted(rng.sample(range(7), 4))
    low, middle, high = (rng.randint(1, 4) for _ in range(3))
    spans = ((near, end, low), (near, far, middle), (begin, far, high))
    spans += ((begin, near, low + middle), (far, end, middle + high))
    lives = list[tuple[int, int, int]]()
    for first, last, size in spans:
        part = rng.randint(1, size)
        lives += [(first, last, x) for x in (part, size - part) if x]
    for _ in range(rng.randint(0, 5)):
        first = rng.randrange(6)
        lives.append((first, rng.randint(first + 1, 6), rng.randint(1, 5)))
    return Layout([Buffer(str(k), *life) for k, life in enumerate(lives)])


def fresh(layout: Layout, seed: int) -> tuple[Forest, choices.Scratch]:
    """Nothing joined."""
    rng = np.random.default_rng(seed)
    forest = _forest(layout.size, layout.first, layout.last, rng)
    return forest, _scratch(len(forest.first), 1 + seed)


def tops(forest: Forest) -> list[int]:
    """The pieces on top, by the lists of where they begin."""
    found = []
    for piece in forest.start_head.tolist():
        while piece >= 0:
            found.append(piece)
            piece = int(forest.start_next[piece])
    return sorted(found)


def ending(forest: Forest) -> list[int]:
    """The pieces on top, by the lists of where they end."""
    found = []
    for piece in forest.end_head.tolist():
        while piece >= 0:
            found.append(piece)
            piece = int(forest.end_next[piece])
    return sorted(found)


def parts(forest: Forest, piece: int) -> list[int]:
    return [int(x) for x in forest.parts[piece, : kernels.parts_of(forest, piece)]]


def free_numbers(forest: Forest) -> list[int]:
    at, count = int(forest.tally[kernels.FREE]), int(forest.tally[kernels.FREE_COUNT])
    return [int(forest.free[(at + k) % len(forest.free)]) for k in range(count)]


def assert_whole(forest: Forest, buffers: int) -> None:
    """Both lists hold the same pieces, every buffer is in one of them, numbers are used once."""
    top, sections = tops(forest), len(forest.due) - 1
    assert top == ending(forest)
    below, todo = list[int](), list(top)
    while todo:
        piece = todo.pop()
        below.append(piece)
        inside = parts(forest, piece)
        todo += inside
        assert bool(inside) == (piece >= buffers)
        if inside:
            area = sum(int(forest.size[x] * (forest.last[x] - forest.first[x])) for x in inside)
            assert area == forest.size[piece] * (forest.last[piece] - forest.first[piece])
            assert forest.first[piece] == min(forest.first[x] for x in inside)
            assert forest.last[piece] == max(forest.last[x] for x in inside)
            assert forest.code[piece] == np.bitwise_xor.reduce(forest.code[inside])
    assert sorted(x for x in below if x < buffers) == list(range(buffers))
    assert sorted(below + free_numbers(forest)) == list(range(len(forest.first)))
    open_ = [x for x in top if forest.first[x] > 0 or forest.last[x] < sections]
    assert forest.tally[kernels.OPEN] == len(open_)


def contents(forest: Forest) -> dict[int, tuple[object, ...]]:
    """What is known of each piece that exists, and which are on top."""
    gone = {*free_numbers(forest)}
    columns = forest.first, forest.last, forest.size, forest.code
    known: dict[int, tuple[object, ...]] = {
        piece: (
            *(int(c[piece]) for c in columns),
            forest.groups[piece].tolist(),
            *parts(forest, piece),
        )
        for piece in range(len(forest.first))
        if piece not in gone
    }
    return known | {-1: tuple(tops(forest)), -2: tuple(free_numbers(forest))}


def stacks_of(pieces: list[int], most: int, most_whole: int) -> Iterator[Stack]:
    """Stacks of pieces that live over the same sections, as `_add_stacks` promises them."""
    for count in range(1, most + 1):
        yield from combinations(pieces, count)
    if most < len(pieces) <= most_whole:
        yield tuple(pieces)


def height(forest: Forest, stack: Stack) -> int:
    return sum(int(forest.size[piece]) for piece in stack)


def between(forest: Forest, begin: int, end: int) -> list[int]:
    return [x for x in tops(forest) if (forest.first[x], forest.last[x]) == (begin, end)]


def beside(forest: Forest, at: int) -> dict[frozenset[int], float]:
    """Every join of stacks beside each other at a boundary, and its key without noise."""
    sections, found = len(forest.due) - 1, dict[frozenset[int], float]()
    before = [between(forest, k, at) for k in range(at)]
    behind = [between(forest, at, k) for k in range(at + 1, sections + 1)]
    every = sum(map(len, before)), sum(map(len, behind))
    for left_pieces, right_pieces in product(before, behind):
        for left, right in product(stacks_of(left_pieces, 3, 12), stacks_of(right_pieces, 3, 12)):
            if height(forest, left) == height(forest, right):
                is_all = (len(left), len(right)) == every
                key = choices.SURE_KEY if is_all else len(left) + len(right)
                found[frozenset(left + right)] = min(key, choices.MOST_KEY)
    return found


def spirals(forest: Forest, at: int) -> dict[frozenset[int], float]:
    """Every spiral whose middle begins or ends at a boundary."""
    sections, found = len(forest.due) - 1, dict[frozenset[int], float]()
    for begin, near, far, end in combinations(range(sections + 1), 4):
        if at not in (near, far):
            continue
        spans = ((near, end, 2), (near, far, 2), (begin, far, 2), (begin, near, 3), (far, end, 3))
        groups = [[*stacks_of(between(forest, x, y), most, 5)] for x, y, most in spans]
        for low, middle, high, left, right in product(*groups):
            heights = [height(forest, stack) for stack in (low, middle, high, left, right)]
            if heights[3] == heights[0] + heights[1] and heights[4] == heights[1] + heights[2]:
                whole = low + middle + high + left + right
                found[frozenset(whole)] = len(whole) - choices.SPIRAL_LESS
    return found


def chosen(scratch: choices.Scratch) -> frozenset[int]:
    return frozenset(scratch.parts[0, : scratch.groups[0].sum()].tolist())


@pytest.mark.parametrize("seed", range(16))
def test_the_look_out_finds_the_best_join(seed: int) -> None:
    layout = small(seed) if seed % 2 else around_a_spiral(seed)
    forest, scratch = fresh(layout, seed)
    seen = 0
    while joins := [k for k in range(1, layout.sections) if beside(forest, k)]:
        for at in range(1, layout.sections):
            scratch.forbidden[0] = 0
            around = spirals(forest, at)
            key = choices.best_spiral(forest, scratch, at, 0.0, kernels.NEVER)
            assert key == pytest.approx(min(around.values(), default=kernels.NEVER))
            assert not around or around[chosen(scratch)] == pytest.approx(key)
            seen += bool(around)
            there = beside(forest, at)
            for _ in range(2):
                key = choices.best_beside(forest, scratch, at, 0.0)
                assert key == min(there.values(), default=kernels.NEVER)
                if there:
                    assert there.pop(chosen(scratch)) == key
                    scratch.forbidden[0] = np.bitwise_xor.reduce(forest.code[[*chosen(scratch)]])
        scratch.forbidden[0] = 0
        choices.best_beside(forest, scratch, joins[0], 0.0)
        first, last, size = scratch.span
        kernels.join(forest, scratch.groups[0], scratch.parts[0], first, last, size)
        assert_whole(forest, len(layout))
    assert seed % 2 or seen


@pytest.mark.parametrize("lives", [SPIRAL, SPLIT], ids=["spiral", "of stacks"])
@pytest.mark.parametrize("seed", range(3))
def test_a_spiral_is_one_piece(lives: list[tuple[int, int, int]], seed: int) -> None:
    found = joined(lives, seed)
    found.improve(2_000)
    assert found.all_joined
    offsets = {str(b): y for piece in found.pieces() for b, y in piece.parts}
    ground = 0
    for piece in found.pieces():
        offsets |= {str(b): y for b, y in piece.above(ground)}
        ground += piece.size
    assert ground == 6
    assert overlap([Buffer(str(k), *life) for k, life in enumerate(lives)], offsets) is None


@pytest.mark.parametrize("seed", range(20))
def test_what_is_undone_is_as_it_was(seed: int) -> None:
    layout = small(seed)
    forest, scratch = fresh(layout, seed)
    searching.rejoin(forest, scratch)
    assert_whole(forest, len(layout))
    for _ in range(10):
        forest.tally[kernels.JOURNAL] = 0
        before = contents(forest)
        searching._ruin(forest, scratch)
        assert_whole(forest, len(layout))
        searching.rejoin(forest, scratch)
        assert_whole(forest, len(layout))
        kernels.undo(forest)
        assert contents(forest) == before
        assert_whole(forest, len(layout))
        assert (forest.due == kernels.NEVER).all()


@pytest.mark.parametrize("seed", range(8))
def test_a_search_keeps_the_fewest(seed: int) -> None:
    layout = small(seed)
    found = JoinedBuffers(layout.size, layout.first, layout.last, np.random.default_rng(seed))
    fewest, work = int(found.best.tally[kernels.OPEN]), found.work
    for _ in range(5):
        before = deepcopy(found.best)
        found.improve(200)
        assert_whole(found.forest, len(layout))
        assert_whole(found.best, len(layout))
        now = int(found.best.tally[kernels.OPEN])
        assert now <= fewest
        if now == fewest:
            assert contents(found.best) == contents(before)
        assert found.work >= work + 200 or found.all_joined
        fewest, work = now, found.work


@pytest.mark.parametrize(("many", "room"), [(2, 0), (3, 7), (5, 0), (14, 0), (16, 0), (30, 1900)])
def test_stacks_of_many_pieces(many: int, room: int) -> None:
    """All of up to three; of more than fourteen only pairs; where the room ends, single ones."""
    size = np.array([3 * k + 1 for k in range(many)], dtype=np.int64)
    heights, entries = np.zeros(choices.STACKS, np.int64), np.zeros((choices.STACKS, 4), np.int64)
    pieces = np.arange(many)
    count = choices._add_stacks(size, pieces, heights, entries, room, 0, many, 3, 12)
    most = 1 if room == 1900 else 2 if many > choices.MANY else 3
    wanted = [
        sum(size[list(s)]) for s in stacks_of(list(range(many)), most, 12 if most == 3 else 0)
    ]
    assert heights[room:count].tolist() == wanted
    full = choices.STACKS - 2
    assert choices._add_stacks(size, pieces, heights, entries, full, 0, many, 3, 12) == full
