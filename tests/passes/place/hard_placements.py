"""Placement instances without slack: a rectangle of time and memory, cut into 100 to 400 buffers.

Every instance has a placement of no waste at all, since its buffers are the pieces of one
rectangle: the bound (the most bytes live at once) is the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from memopt.strategies.olla import Buffer

Piece = tuple[int, int, int, int]
"""First instant, last instant (excluded), first byte, last byte (excluded)."""


@dataclass(frozen=True)
class Recipe:
    """How a rectangle is cut.

    Attributes:
        buffers: number of pieces, about.
        instants, units: width and height of the rectangle; few have many buffers begin and end
            together, or be of equal sizes.
        unit_bytes: size of a unit of height.
        spirals: share of cuts that are into five pieces which no straight cut separates.
        upright: how often a cut is across time, for a square piece.
        even: pieces are cut at about their middles, not anywhere.
    """

    buffers: int
    instants: int
    units: int
    unit_bytes: int
    spirals: float
    upright: float
    even: bool


def recipe(rng: Random) -> Recipe:
    """Draw a recipe."""
    return Recipe(
        buffers=rng.randint(100, 400),
        instants=int(2 ** rng.uniform(5, 11)),
        units=int(2 ** rng.uniform(7, 20)),
        unit_bytes=rng.choice([1, 64, 512]),
        spirals=rng.choice([0.0, 0.3, 1.0]),
        upright=rng.uniform(0.3, 0.7),
        even=rng.random() < 0.5,
    )


def hard_placement(seed: int) -> tuple[Recipe, tuple[Buffer, ...]]:
    """Draw an instance, its buffers in random order."""
    rng = Random(seed)
    chosen = recipe(rng)
    pieces = _pieces(rng, chosen)
    rng.shuffle(pieces)
    unit = chosen.unit_bytes
    return chosen, tuple(
        Buffer(str(index), begin, end, (top - bottom) * unit)
        for index, (begin, end, bottom, top) in enumerate(pieces)
    )


def _pieces(rng: Random, chosen: Recipe) -> list[Piece]:
    """Cut the rectangle piece by piece: large pieces first, more often than not."""
    pieces: list[Piece] = [(0, chosen.instants, 0, chosen.units)]
    whole: list[Piece] = []
    while pieces and len(pieces) + len(whole) < chosen.buffers:
        picked = max(rng.sample(pieces, min(len(pieces), 3)), key=lambda p: _share(p, chosen))
        pieces.remove(picked)
        parts = _cut(rng, picked, chosen)
        if len(parts) == 1:
            whole.append(picked)
        else:
            pieces += parts
    return pieces + whole


def _share(piece: Piece, chosen: Recipe) -> float:
    """Give the part of the rectangle that is a piece."""
    begin, end, bottom, top = piece
    return (end - begin) * (top - bottom) / (chosen.instants * chosen.units)


def _cut(rng: Random, piece: Piece, chosen: Recipe) -> list[Piece]:
    """Cut a piece in two, or in five around each other; give it itself where it is too small."""
    begin, end, bottom, top = piece
    wide, high = end - begin > 1, top - bottom > 1
    if min(end - begin, top - bottom) > 2 and rng.random() < chosen.spirals:
        return _spiral(rng, piece)
    # Pieces that are long in time are cut across it more often.
    long = (end - begin) / chosen.instants / ((top - bottom) / chosen.units)
    upright = rng.random() < chosen.upright * long / (chosen.upright * long + 1 - chosen.upright)
    if wide and (upright or not high):
        at = _between(rng, begin, end, chosen.even)
        return [(begin, at, bottom, top), (at, end, bottom, top)]
    if high:
        at = _between(rng, bottom, top, chosen.even)
        return [(begin, end, bottom, at), (begin, end, at, top)]
    return [piece]


def _between(rng: Random, low: int, high: int, even: bool) -> int:
    """Where to cut."""
    margin = (high - low) // 3 if even else 0
    return rng.randint(low + max(1, margin), high - max(1, margin))


def _spiral(rng: Random, piece: Piece) -> list[Piece]:
    """Cut four pieces around a fifth, either way round."""
    begin, end, bottom, top = piece
    left, right = sorted(rng.sample(range(begin + 1, end), 2))
    low, high = sorted(rng.sample(range(bottom + 1, top), 2))
    middle = (left, right, low, high)
    if rng.random() < 0.5:
        return [
            (begin, right, bottom, low),
            (right, end, bottom, high),
            (left, end, high, top),
            (begin, left, low, top),
            middle,
        ]
    return [
        (left, end, bottom, low),
        (right, end, low, top),
        (begin, right, high, top),
        (begin, left, bottom, high),
        middle,
    ]
