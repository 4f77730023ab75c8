"""Chain steps as integers, for compiled loops: code = CODE_BASE · stage + move."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.models.steps import ChainStep, Move

FORWARD_NO_SAVE, FORWARD_CHECKPOINT, FORWARD_ALL, BACKWARD, DROP_ACTIVATION, DROP_SAVED = range(6)
CODE_BASE = 8

MOVES = (
    Move.FORWARD_NO_SAVE,
    Move.FORWARD_CHECKPOINT,
    Move.FORWARD_ALL,
    Move.BACKWARD,
    Move.DROP_ACTIVATION,
    Move.DROP_SAVED,
)


def steps_of(codes: Iterable[int]) -> tuple[ChainStep, ...]:
    """The chain steps that `codes` stand for."""
    return tuple(ChainStep(MOVES[int(code) % CODE_BASE], int(code) // CODE_BASE) for code in codes)


def codes_of(steps: Iterable[ChainStep]) -> tuple[int, ...]:
    """The codes of chain steps."""
    return tuple(CODE_BASE * step.stage + MOVES.index(step.move) for step in steps)
