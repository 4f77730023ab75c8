"""Switches planning of wrapped models off for a thread, and lets ranks meet that call a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from memopt.errors import GuardError, RankError
from memopt.executor.in_step import InStep
from memopt.step.described import described_text
from memopt.step.rank_errors import is_of_group, lost
from memopt.step.ranks import Ranks, note_failure, ranks_of
from memopt.step.shards import meet_for
from memopt.torch_private.engine_hooks import has_engine

_HERE = threading.local()
_RANKS: WeakKeyDictionary[nn.Module, Ranks | None] = WeakKeyDictionary()
"""Planned model → the ranks that run it together, inside an engine's hooks."""
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def runs_unplanned() -> bool:
    """Return whether wrapped models that this thread calls now run without a plan."""
    return getattr(_HERE, "running", False)


def passes_on(model: nn.Module) -> bool:
    """Return whether a call of the model runs as it is, since this thread runs without plans or
    since it is a call of a method: Lightning sends `training_step` through the forward of what is
    around the model, such as DistributedDataParallel. What that calls is planned."""
    if runs_unplanned():
        return True
    forward = model.__dict__.get("forward")
    package = getattr(forward, "__module__", "").partition(".")[0]
    named = getattr(forward, "__qualname__", "")
    return package in _LIGHTNING and named.endswith(".wrapped_forward")


@contextlib.contextmanager
def unplanned() -> Iterator[None]:
    """Run wrapped models without a plan in the block, as within a planned call of another."""
    before = runs_unplanned()
    _HERE.running = True
    try:
        yield
    finally:
        _HERE.running = before


def agreed(model: nn.Module, why: str | None, kind: Any, refuses: bool) -> str | None:
    """Return why a call runs without a plan on all ranks that run a model together; None: the same
    plan can serve it on all.

    Args:
        model: has plans, which the ranks have in common.
        why: it does so on this rank; None: it need not.
        kind: of the call (`SelfPlanning._kind`), if it need not.
        refuses: whether calls that no plan serves are refused.

    Raises:
        RankError: a rank is gone or elsewhere; or the calls differ, and are refused.
        ExecutionError: a step has failed on this rank.
    """
    if model not in _RANKS:
        _RANKS[model] = ranks_of(model)
    if (ranks := _RANKS[model]) is None:
        return why
    ranks.group.check_in_step()
    own = [] if why is not None else [described_text(one) for one in kind[1]]
    told = ranks.exchanged((why, ", ".join(own), kind and kind[2:]), "a call begins")
    _, inputs, others = told[0]
    for rank, (reason, found, *rest) in zip(ranks.members, told, strict=True):
        differs = _DIFFERS.format(ranks.members[0], inputs, rank, found)
        if reason is not None:
            InStep(ranks).runs_unplanned()
            return why or f"on rank {rank} {reason}"
        if (found, *rest) != (inputs, others):
            if refuses:
                raise RankError(differs)
            InStep(ranks).runs_unplanned()
            return differs
    return None


_DIFFERS = (
    "ranks call it with other inputs, gradients or trained parameters than others (rank {} with "
    "{}, rank {} with {}): pad batches to the same shapes on all ranks"
)


@contextlib.contextmanager
def beside_ranks(model: nn.Module, evaluates: bool) -> Iterator[None]:
    """Run a call of a model, of which other ranks may hold parts, beside theirs. A plan has other
    collectives than the model: ranks meet where they begin to evaluate, or to train again. A
    process group's error in the call becomes the one that says where the ranks are; one that was
    not planned is noted for those that wait for it in vain. (An engine's hooks communicate the same
    way around both, and have their own errors.)

    Raises:
        RankError: a rank is gone, or not all evaluate.
    """
    if not has_engine(model):
        meet_for(model, "a model is evaluated" if evaluates else "a model is trained")
    try:
        yield
    except RuntimeError as error:
        ranks = ranks_of(model) if is_of_group(error) and not has_engine(model) else None
        if ranks is None:
            raise
        raise lost(error, "a call runs unplanned", ranks.members) from error
    except GuardError as error:
        if ranks_of(model) is not None:
            note_failure("a call is compared with its plan", error)
        raise
