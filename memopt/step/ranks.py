"""Lets the processes that plan and run one step together exchange messages.

The step's own collectives run on the user's process groups; the messages here go over a separate
gloo group, which has the default group's timeout.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memopt.errors import CaptureError, MemoptError, RankError
from memopt.torch_private.access import private
from memopt.torch_private.distributed import timeout_of

T = TypeVar("T")

_SHOWN = 300
_FAILED = "failed"
_WORD = "memopt/failed step"


@dataclass(frozen=True)
class Ranks:
    """The processes that hold parts of one model.

    Attributes:
        members: their ranks in the world, ascending.
        group: their gloo group.
    """

    members: tuple[int, ...]
    group: Any

    @property
    def is_first(self) -> bool:
        """Return whether this process is the one that plans."""
        return torch.distributed.get_rank() == self.members[0]

    def exchanged(self, value: T, doing: str) -> list[T]:
        """Exchange values; return each rank's, in the order of ranks.

        Args:
            value: this rank's, picklable.
            doing: the present activity, for messages.

        Raises:
            RankError: a rank is gone, or does not answer within the group's timeout.
        """
        return [value for _, value in self._exchange((doing, value), doing)]

    def _exchange(self, word: tuple[str, Any], doing: str) -> list[tuple[str, Any]]:
        """Exchange (activity, value) between the ranks, or (FAILED, reason); raise RankError if one
        of them failed or does something else."""
        found: list[Any] = [None] * len(self.members)
        with lost_ranks(doing):
            torch.distributed.all_gather_object(found, word, group=self.group)
        for rank, (what, value) in zip(self.members, found, strict=True):
            if what == _FAILED != word[0]:
                raise RankError(f"rank {rank} failed while {doing}: {value}")
            if what != word[0] != _FAILED:
                raise RankError(
                    f"the ranks are at different places: here {doing}, on rank {rank} {what}. "
                    f"{_SAME}"
                )
        return found

    def from_first(self, make: Callable[[], T], doing: str) -> T:
        """Run `make` on the first rank; return its result, or raise its error, on all ranks.

        Raises:
            RankError: a rank is gone, is elsewhere, or `make` failed on the first by a defect. And
                whatever error for users `make` raises, on every rank.
        """
        made: list[Any] = [None]
        with self.failing_together(doing):
            if self.is_first:
                try:
                    made = [(True, make())]
                except (MemoptError, ValueError) as error:
                    made = [(False, _portable(error))]
        with lost_ranks(doing):
            torch.distributed.broadcast_object_list(made, self.members[0], group=self.group)
        succeeded, value = made[0]
        if not succeeded:
            raise value
        made_there: T = value
        return made_there

    def report_failure(self, doing: str) -> None:
        """Leave a message for the other ranks: this one has failed while `doing`."""
        with suppress(RuntimeError, ValueError):
            rank = torch.distributed.get_rank()
            self._store().set(_WORD, f"rank {rank} failed {doing}")

    def reported_failure(self) -> str | None:
        """Return the message of a rank that has failed; None: there is none."""
        with suppress(RuntimeError, ValueError):
            store = self._store()
            if store.check([_WORD]):
                return str(store.get(_WORD).decode())
        return None

    @staticmethod
    def _store() -> Any:
        return private("torch.distributed.distributed_c10d._get_default_store")()

    def check_same(self, facts: dict[str, str], doing: str) -> None:
        """Raise RankError on every rank unless each fact is the same on all of them.

        Args:
            facts: name → value, for people.
            doing: the present activity, for messages.
        """
        own = hashlib.sha256(repr(facts).encode()).hexdigest()
        if len(set(self.exchanged(own, doing))) == 1:
            return
        everyone = self.exchanged(facts, doing)
        for what, expected in everyone[0].items():
            for rank, found in zip(self.members, everyone, strict=True):
                if found.get(what) != expected:
                    here, there = _from_first_difference(expected, found.get(what, "none"))
                    raise RankError(
                        f"the ranks do not have the same {what}: rank {self.members[0]} has "
                        f"{here}, rank {rank} has {there}. {_SAME}"
                    )

    @contextmanager
    def failing_together(self, doing: str) -> Iterator[None]:
        """Make an error on one rank in the block fail all: there with its own error, on the others
        with a RankError that quotes it."""
        try:
            yield
        except RankError:
            raise  # the other ranks have it, too
        except Exception as error:
            with suppress(RankError):
                self._exchange((_FAILED, f"{type(error).__name__}: {error}"), doing)
            raise
        self.exchanged(None, doing)


_SAME = "Every rank must run the same script with the same model, arguments and libraries"

_NOW: ContextVar[Ranks | None] = ContextVar("memopt_ranks", default=None)
_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Default group → ranks → their gloo group. They end with a default group that is destroyed, since
another one may get the same address."""


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
def lost_ranks(doing: str) -> Iterator[None]:
    """Turn a process group's error inside into one that says what it means.

    Raises:
        RankError: another rank is gone, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_group(error):
            raise
        raise lost(error, doing) from error


def lost(error: Exception, doing: str) -> RankError:
    """Return the RankError that says what a process group's error means."""
    reason = str(error).strip().partition("\n")[0]
    return RankError(
        f"another rank is gone, or did not answer in time, while {doing}: {reason}. Look at the "
        "other ranks' output for the first error"
    )


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
    """Return whether a default group of several processes is there. (The `fake` group's are
    not.)"""
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
    return _ranks(members_of(model))


def ranks_in(mesh: DeviceMesh) -> Ranks | None:
    """Return the processes of a mesh; None as for `ranks_of`."""
    return _ranks(tuple(sorted(mesh.mesh.flatten().tolist())))


def _ranks(members: tuple[int, ...]) -> Ranks | None:
    distributed = torch.distributed
    if len(members) < 2 or not distributed.is_available() or not distributed.is_initialized():
        return None
    return None if distributed.get_backend() == "fake" else Ranks(members, _group(members))


def _group(members: tuple[int, ...]) -> Any:
    """Return the gloo group of some ranks, made once by all of them."""
    groups = _GROUPS.setdefault(torch.distributed.group.WORLD, {})
    if members not in groups:
        groups[members] = torch.distributed.new_group(
            list(members), timeout=timeout(), backend="gloo", use_local_synchronization=True
        )
    return groups[members]


def timeout() -> timedelta | None:
    """Return how long the default group's collectives wait for a rank; None: torch's default."""
    return timeout_of(torch.distributed.group.WORLD)


def is_of_group(error: Exception) -> bool:
    """Return whether an error says that a process group's collective failed."""
    if not isinstance(error, RuntimeError):
        return False
    text = f"{type(error).__name__} {error}"
    words = ("gloo", "Timed out", "timed out", "Connection", "DistBackendError", "NCCL", "Broken")
    return isinstance(error, torch.distributed.DistError) or any(word in text for word in words)


def _portable(error: Exception) -> Exception:
    """Return the error in a form that can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except (TypeError, pickle.PicklingError, AttributeError):
        return RankError(f"{type(error).__name__}: {error}")
    return error


def _from_first_difference(one: str, other: str) -> tuple[str, str]:
    """Cut two texts to begin a little before their first difference."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    pairs = enumerate(zip(one, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    begin = max(0, first - 60)
    return tuple(f"...{text[begin : begin + _SHOWN]}..." for text in (one, other))  # type: ignore[return-value]
