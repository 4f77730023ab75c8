"""Lets the processes that plan and run one step together exchange messages.

The step's own collectives run on the user's process groups; the messages here go over a gloo group
of memopt's own (`memopt.step.rank_groups`), which has the default group's timeout.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memopt.errors import CaptureError, MemoptError, NothingToTrainError, RankError, led_to
from memopt.step.rank_errors import from_first_difference, is_of_group, lost, portable
from memopt.step.rank_groups import (
    RankGroup,
    default_store,
    fail_alone,
    forget_words,
    group_of,
    note_alone,
)

T = TypeVar("T")

_FAILED = "failed"
_WORD = "memopt/failed step"
_TOLD = "_memopt_told_to_ranks"


@dataclass(frozen=True)
class Ranks:
    """The processes that hold parts of one model."""

    members: tuple[int, ...]
    group: RankGroup
    kind: str

    @property
    def is_first(self) -> bool:
        """Return whether this process is the one that plans."""
        return torch.distributed.get_rank() == self.members[0]

    def exchanged(self, value: T, doing: str) -> list[T]:
        """Exchange values; return each rank's, in the order of ranks.

        Raises:
            RankError: a rank is gone, or does not answer within the group's timeout.
        """
        return [value for _, value in self._exchange((doing, value), doing)]

    def _exchange(self, word: tuple[str, Any], doing: str) -> list[tuple[str, Any]]:
        """Exchange (activity, value), or (FAILED, sentence); raise RankError where one differs."""
        with self._lost_ranks(doing):
            found = self.group.gathered(word, self.kind)
        forget_words()
        if word[0] == _FAILED:
            return found
        for what, value in found:
            if what == _FAILED:
                raise RankError(value)
        for rank, (what, _) in zip(self.members, found, strict=True):
            if what != found[0][0]:
                failed = self.reported_failure()  # of a step, which a loop may have gone on from
                why = _SAME if failed is None else f"Before that, {failed[1]}"
                raise RankError(
                    f"the ranks are at different places: on rank {self.members[0]} {found[0][0]}, "
                    f"on rank {rank} {what}. {why}"
                )
        return found

    def from_first(self, make: Callable[[], T], doing: str) -> T:
        """Run `make` on the first rank; return its result, or raise its error, on all ranks.

        Raises:
            RankError: a rank is gone, is elsewhere, or `make` failed on the first by a defect. And
                whatever error for users `make` raises, on every rank.
        """
        made: Any = None
        with self.failing_together(doing):
            if self.is_first:
                try:
                    made = True, make()
                except (MemoptError, ValueError) as error:
                    made = False, portable(error)
        with self._lost_ranks(doing):
            succeeded, value = self.group.from_first(made, self.kind)
        if not succeeded:
            setattr(value, _TOLD, str(value))
            raise value
        made_there: T = value
        return made_there

    def report_failure(self, what: str, step: int = 0) -> str:
        """Leave a message for the other ranks that this one "failed ..." or "refused ...".

        Args:
            what: what this rank did, a verb first.
            step: the number of the whole step in which that was; 0: in a module's step.

        Returns:
            The message as the others read it.
        """
        text = what
        with suppress(RuntimeError, ValueError):  # the process group may be gone
            text = f"rank {torch.distributed.get_rank()} {what}"
            default_store().set(_WORD, f"{step} {text}")
        return text

    def reported_failure(self) -> tuple[int, str] | None:
        """Return the message of a rank that has failed, with its step; None: there is none."""
        with suppress(RuntimeError, ValueError):
            store = default_store()
            if store.check([_WORD]):
                step, _, text = str(store.get(_WORD).decode()).partition(" ")
                return int(step), text
        return None

    def forget_failure(self) -> None:
        """Drop the message of steps before: ranks call it before they meet."""
        self.group.failed = ""
        with suppress(RuntimeError, ValueError):
            default_store().delete_key(_WORD)

    @contextmanager
    def _lost_ranks(self, doing: str) -> Iterator[None]:
        """Turn the group's error inside into one that says what it means, the same on all ranks.

        Raises:
            RankError: another rank is gone, has failed, or does not answer.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_of_group(error):
                raise
            raise RankError(self.group.close(str(lost(error, doing, self.members)))) from error

    def check_same(self, facts: dict[str, str], doing: str) -> None:
        """Raise RankError on every rank unless each fact is the same on all of them."""
        own = hashlib.sha256(repr(facts).encode()).hexdigest()
        if len(set(self.exchanged(own, doing))) == 1:
            return
        everyone = self.exchanged(facts, doing)
        for what, expected in everyone[0].items():
            for rank, found in zip(self.members, everyone, strict=True):
                if found.get(what) != expected:
                    here, there = from_first_difference(expected, found.get(what, "none"))
                    raise RankError(
                        f"the ranks do not have the same {what}: rank {self.members[0]} has "
                        f"{here}, rank {rank} has {there}. {_SAME}"
                    )

    @contextmanager
    def failing_together(self, doing: str) -> Iterator[None]:
        """Make an error on one rank in the block fail all: there with its own error, on the others
        with a RankError that quotes it, and whose sentence is a note of the error there."""
        try:
            yield
        except RankError:
            raise  # the other ranks have it, too
        except Exception as error:
            told: list[tuple[str, Any]] = []
            sentence = _failure(doing, error)
            with suppress(RankError):
                told = self._exchange((_FAILED, sentence), doing)
            _mark_told(error, sentence)
            own = torch.distributed.get_rank()
            others_plan = any(what != _FAILED for what, _ in told)
            if isinstance(error, NothingToTrainError) and others_plan:
                # It would run its call unplanned, which waits for the others.
                raise RankError(sentence) from error
            if is_of_group(error):
                others = [one for one in zip(self.members, told, strict=False) if one[0] != own]
                cause = next((why for _, (what, why) in others if what == _FAILED), None)
                if cause is not None:
                    raise RankError(cause) from error
                raise lost(error, doing, self.members) from error
            raise
        self.exchanged(None, doing)


_SAME = (
    "Every rank must run the same script with the same model, libraries and arguments (batches "
    "padded to the same shapes)"
)

_NOW: ContextVar[Ranks | None] = ContextVar("memopt_ranks", default=None)

_COMMUNICATES: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
"""Model → the ranks that it communicates with in its own forward and backward, as far as found."""


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Make all ranks measure in step with one another inside."""
    token = _NOW.set(ranks)
    try:
        yield
    finally:
        _NOW.reset(token)


def alone() -> bool:
    """Return whether no other rank measures together with this one."""
    return _NOW.get() is None


def check_together(model: nn.Module) -> None:
    """Refuse to measure on one rank alone a model that several ranks run together.

    Raises:
        ValueError: several ranks hold parts of the model, and do not measure together now.
    """
    if alone() and ranks_of(model) is not None:
        raise ValueError(
            "several ranks hold this model, and would wait for one another: memopt.plan and "
            'memopt.wrap, called on all of them, measure it; for the rest take mode="estimate"'
        )


def largest(values: Sequence[float]) -> list[float]:
    """Return the values, each the largest over all ranks that measure together."""
    ranks = _NOW.get()
    if ranks is None:
        return list(values)
    everyone = ranks.exchanged(list(values), "measuring")
    return [max(several) for several in zip(*everyone, strict=True)]


def check_same_step(operators: Iterable[str]) -> None:
    """Raise RankError, if ranks measure together, unless all have captured the same operators."""
    ranks = _NOW.get()
    if ranks is not None:
        ranks.check_same({"step": ", ".join(operators)}, "measuring")


def meet() -> None:
    """Wait, if ranks measure together, until all have come this far.

    Raises:
        RankError: a rank has failed, and does not come.
    """
    largest([])


@contextmanager
def telling_ranks(model: nn.Module, doing: str, members: tuple[int, ...] = ()) -> Iterator[None]:
    """Let an error inside end the planning of all ranks that run a model: those to whom it is not
    told yet would wait for this one.

    Args:
        model: what is planned, sharded, applied...
        doing: the present activity, for messages.
        members: the ranks, where the model does not show them yet.
    """
    before = sys.exception()
    try:
        yield
    except NothingToTrainError:
        raise  # the model runs unplanned
    except Exception as error:
        if several_are_there() and not _is_told(error):
            told = next(filter(_is_told, led_to(error, before)), None)
            reason = _failure(doing, error) if told is None else getattr(told, _TOLD, str(told))
            if told is None:
                with suppress(RuntimeError, ValueError):
                    fail_alone(members or members_of(model), _kind(model), reason)
            _mark_told(error, reason)
        raise


def note_failure(doing: str, error: Exception) -> None:
    """Leave a note of an error for ranks that wait in vain for this one."""
    if several_are_there():
        with suppress(RuntimeError, ValueError):
            note_alone(_failure(doing, error))


def _failure(doing: str, error: Exception) -> str:
    rank = torch.distributed.get_rank()
    return f"rank {rank} failed while {doing}: {type(error).__name__}: {error}"


def _mark_told(error: Exception, sentence: str) -> None:
    """Mark an error as reported to the other ranks, and add the sentence they got as a note."""
    setattr(error, _TOLD, sentence)
    error.add_note(sentence)


def check_untrained(model: nn.Module) -> None:
    """Raise RankError on every rank that runs a model unless a call of it trains nothing on any:
    where it does, the ranks plan it."""
    ranks = ranks_of(model)
    if ranks is not None:
        ranks.exchanged(None, "a call has nothing to train")


def _is_told(error: BaseException) -> bool:
    """Return whether an error was reported to the other ranks."""
    return isinstance(error, RankError) or hasattr(error, _TOLD)


def _kind(model: nn.Module) -> str:
    """Return what tells a model from others, the same on all ranks."""
    names = [name for name, _ in model.named_parameters()]
    return hashlib.sha256(repr((type(model).__name__, names)).encode()).hexdigest()[:16]


def check_in_step(target: Any) -> None:
    """Refuse a collective that this rank would run without the others.

    Args:
        target: an operator that is about to run while memopt plans.

    Raises:
        CaptureError: it is a collective, and this rank plans alone.
    """
    if str(target).startswith(_COLLECTIVES) and alone() and several_are_there():
        raise CaptureError(
            f"the model communicates with other ranks ({target}) where no graph holds it, in a "
            "hook or in a function that is not traced (memopt.opaque), so that ranks that plan "
            "would wait for one another: communicate in the forward itself, by torch.distributed "
            "or its functional collectives, or outside of what is planned"
        )


_COLLECTIVES = ("c10d.", "_c10d_functional.")


def several_are_there() -> bool:
    """Return whether the default process group has several processes. (A `fake` one has not.)"""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


def is_searched(model: nn.Module) -> bool:
    """Return whether the ranks that a model communicates with are known."""
    return model in _COMMUNICATES


def note_members(model: nn.Module, members: tuple[int, ...]) -> None:
    """Note the ranks that a model communicates with in its own forward and backward."""
    _COMMUNICATES[model] = members


def members_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that run a model together, ascending: they hold parts of it, or it is known
    to communicate with them."""
    return tuple(sorted({*sharers_of(model), *_COMMUNICATES.get(model, ())}))


def sharers_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that hold parts of a model's parameters or buffers, ascending; none if it
    has no DTensors."""
    members: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            members.update(mesh.mesh.flatten().tolist())
    return tuple(sorted(members))


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the processes that run a model together (`members_of`); None: this one runs it by
    itself, or is alone (the `fake` process group's ranks do not exist)."""
    return ranks_among(members_of(model), model)


def ranks_in(mesh: DeviceMesh, model: nn.Module) -> Ranks | None:
    """Return the processes of a mesh, over which a model is sharded; None as for `ranks_of`."""
    return ranks_among(members_in(mesh), model)


def members_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def ranks_among(members: tuple[int, ...], model: nn.Module) -> Ranks | None:
    """Return these ranks, as those of a model; None as for `ranks_of`."""
    distributed = torch.distributed
    if len(members) < 2 or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_backend() == "fake":
        return None
    kind = _kind(model)
    return Ranks(members, group_of(members, kind), kind)
