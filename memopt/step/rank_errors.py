"""Says what a process group's errors mean, and what ranks have that differs."""

from __future__ import annotations

import pickle

import torch.distributed

from memopt.errors import RankError
from memopt.step.rank_groups import first_said, last_failure_alone, waited

_SHOWN = 300
_OTHERWISE = (
    "the ranks took different steps: give all of them as many batches, padded to the same shapes, "
    "and the same branches"
)
"""What ends the waiting for a rank that is there."""


def lost(error: Exception, doing: str, members: tuple[int, ...]) -> RankError:
    """Return the RankError that says what a process group's error means, and where the ranks are,
    the same on all ranks that wait in vain at the time."""
    # Of gloo's text its first sentence: the rest guesses at the cause.
    line = str(error).strip().partition("\n")[0]
    reason = line.partition(". This is typically caused")[0].removesuffix(".")
    before = last_failure_alone()
    places = "" if before else waited(members, doing)
    where = f": {places} ({reason})" if places else f", while {doing}: {reason}"
    look = (
        f"Before that, {before}"
        if before
        else f"Look at the other ranks' output for the first error; without one {_OTHERWISE}"
    )
    text = f"another rank is gone, or did not answer in time{where}. {look}"
    return RankError(first_said(members, text))


def is_of_group(error: Exception) -> bool:
    """Return whether an error says that a process group's collective failed."""
    if not isinstance(error, RuntimeError):
        return False
    text = f"{type(error).__name__} {error}"
    words = ("gloo", "Timed out", "timed out", "Connection", "DistBackendError", "NCCL", "Broken")
    return isinstance(error, torch.distributed.DistError) or any(word in text for word in words)


def portable(error: Exception) -> Exception:
    """Return the error in a form that can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except (TypeError, pickle.PicklingError, AttributeError):
        return RankError(f"{type(error).__name__}: {error}")
    return error


def from_first_difference(one: str, other: str) -> tuple[str, str]:
    """Cut two texts to begin a little before their first difference."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    pairs = enumerate(zip(one, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    begin = max(0, first - 60)
    return tuple(f"...{text[begin : begin + _SHOWN]}..." for text in (one, other))  # type: ignore[return-value]
