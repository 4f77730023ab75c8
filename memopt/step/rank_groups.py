"""The gloo groups over which ranks exchange messages while they plan.

Ranks make a group together, at their first message. One that fails where the others do not leaves
the reason in the default group's store and closes its end: the others, which wait for it, find
their connection closed, and quote the reason. The next message makes a new group. A rank that does
not know the others yet only leaves the reason: ranks meet in the store before their first message
about a kind of model.
"""

from __future__ import annotations

import atexit
import hashlib
import pickle
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed

from memopt.errors import ExecutionError, RankError
from memopt.step.collectives import let_go
from memopt.torch_private.access import private
from memopt.torch_private.distributed import timeout_of

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own
_LONGEST_LOOK_S = 0.25
_SIZE_BYTES, _FIRST_BYTES = 8, 1024
"""Of a value's size, and of the message with it, which holds a small value, too."""
_ALONE = "memopt/alone"
_WAITED = "memopt/waited"
_LAST_WORDS_S = 2.0
"""For how long a rank that waited in vain waits for the others to say where they did."""


@dataclass(eq=False)
class RankGroup:
    """The groups of some ranks, of which one at a time is open.

    Attributes:
        members: the ranks, ascending.
        failures: kind of model → how often this process failed alone with one.
        closed: how many groups of these ranks are closed.
        failed: how a step of theirs failed on this one, which runs no other; "": none did.
    """

    members: tuple[int, ...]
    failures: dict[str, int]
    closed: int = 0
    failed: str = ""
    _open: Any = field(default=None, repr=False)
    _met: set[str] = field(default_factory=set, repr=False)

    def gathered(self, value: Any, kind: str) -> list[Any]:
        """Return each rank's value, in the order of ranks.

        Raises:
            RuntimeError: of the group: a rank is gone, or does not come within the timeout.
            RankError: a rank failed before the group was made.
        """
        group = self._opened(kind)
        own = _packed(value)
        size = torch.tensor([own.numel()], device="cpu").view(torch.uint8)
        first = torch.cat([size, own])[:_FIRST_BYTES]
        first = torch.nn.functional.pad(first, (0, _FIRST_BYTES - first.numel()))
        found = [torch.empty_like(first) for _ in self.members]
        self._wait_for(group.allgather([found], [first]))
        found = [*map(let_go, found)]
        sizes = [int(one[:_SIZE_BYTES].view(torch.int64)) for one in found]
        found = [one[_SIZE_BYTES:] for one in found]
        if (most := max(sizes)) > found[0].numel():
            found = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in self.members]
            group.allgather([found], [torch.nn.functional.pad(own, (0, most - own.numel()))]).wait()
            found = [*map(let_go, found)]
        return [_unpacked(one[:size]) for one, size in zip(found, sizes, strict=True)]

    def from_first(self, value: Any, kind: str) -> Any:
        """Return the first rank's value; arguments and errors as of `gathered`."""
        group = self._opened(kind)
        own = _packed(value)
        size = torch.tensor([own.numel()], device="cpu")
        group.broadcast(size, 0).wait()
        if torch.distributed.get_rank() != self.members[0]:
            own = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        group.broadcast(own, 0).wait()
        return _unpacked(own)

    def close(self, reason: str) -> str:
        """Close the group, or the one that was to be made next, for a reason.

        Returns:
            The reason for which it was closed first, by whichever rank.
        """
        key = f"{self._key()}/closed"
        with suppress(RuntimeError, ValueError):  # the rank that kept the store is gone
            reason = str(default_store().compare_set(key, "", reason).decode())
        self._open = None
        self._met.clear()
        self.closed += 1
        return reason

    def check_in_step(self) -> None:
        """Raise ExecutionError if a step has failed on this rank."""
        if self.failed:
            raise ExecutionError(
                f"a step failed on this rank ({self.failed}), and the ranks are not in step "
                "any more: start them again from the last checkpoint"
            )

    def _key(self) -> str:
        named = hashlib.sha256(repr(self.members).encode()).hexdigest()[:16]
        return f"memopt/ranks/{named}/{self.closed}"

    def _opened(self, kind: str) -> Any:
        if kind not in self._met:
            self._wait_for_all(kind)
            self._met.add(kind)
        if self._open is None:
            made: Any = torch.distributed.distributed_c10d
            store = made.PrefixStore(self._key(), default_store())
            place = self.members.index(torch.distributed.get_rank())
            self._open = made.ProcessGroupGloo(store, place, len(self.members), timeout())
        return self._open

    def _wait_for(self, message: Any) -> None:
        """Wait for the others' messages. Meanwhile release ranks that wait to meet about another
        kind of model: their messages show that the ranks differ."""
        while not message.is_completed():
            with suppress(RuntimeError):
                message.wait(timedelta(seconds=2 * _LONGEST_LOOK_S))
                return
            store, place = default_store(), self._place()
            with suppress(RuntimeError, ValueError):  # the rank that kept the store is gone
                if store.check([place]):
                    store.set(store.get(place).decode(), "met")
        message.wait()

    def _place(self) -> str:
        return f"{self._key()}/{len(self._met)}.{sum(self.failures.values())}"

    def _wait_for_all(self, kind: str) -> None:
        """Wait until all ranks are about to exchange messages about a kind of model.

        Raises:
            RankError: one of them failed before.
            DistStoreError: they do not come within the timeout.
        """
        store, key, own = default_store(), self._key(), self.failures.get(kind, 0)
        met = f"{key}/{kind}.{own}"
        first = store.compare_set(self._place(), "", met).decode()
        if first != met or store.add(f"{met}/here", 1) == len(self.members):
            store.set(first, "met")  # about different models: their first messages tell
            return
        begin_s, look_s = time.monotonic(), 0.001
        while not store.check([met]):
            if store.check([_failure_key(kind, own + 1)]):
                self.failures[kind] = own + 1
                raise RankError(store.get(_failure_key(kind, own + 1)).decode())
            if store.check([f"{key}/closed"]):
                raise RankError(self.close(""))
            if time.monotonic() - begin_s > timeout().total_seconds():
                raise torch.distributed.DistStoreError(
                    f"not all of the ranks {list(self.members)} have come within {timeout()}"
                )
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)


@dataclass(frozen=True)
class _Groups:
    """What is known beside one default process group.

    Attributes:
        of: ranks → their group.
        failures: kind of model → how often this process failed alone with one.
        members: kind of model → the ranks that last ran one.
        words: keys of this rank's messages about waiting in vain.
    """

    of: dict[tuple[int, ...], RankGroup] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


_KNOWN: WeakKeyDictionary[Any, _Groups] = WeakKeyDictionary()
"""Default group → the groups made beside it. They end with one that is destroyed, since another one
may get the same address."""


def _known() -> _Groups:
    return _KNOWN.setdefault(torch.distributed.group.WORLD, _Groups())


def group_of(members: tuple[int, ...], kind: str) -> RankGroup:
    """Return the group of the ranks that run a model of a kind."""
    known = _known()
    known.members[kind] = members
    return known.of.setdefault(members, RankGroup(members, known.failures))


def fail_alone(members: tuple[int, ...], kind: str, reason: str) -> None:
    """Tell ranks that wait for this one, now or later, that it has failed.

    Args:
        members: the ranks that run its model; fewer than two: unknown, or those of an earlier
            model of its kind.
        kind: of its model.
        reason: the sentence that they are to quote.
    """
    note_alone(reason)
    if len(members) < 2:
        members = _known().members.get(kind, ())
    if len(members) > 1:
        group_of(members, kind).close(reason)
        return
    # Heard by those that wait to make a group for such a model and have not failed as often.
    failures = _known().failures
    failures[kind] = failures.get(kind, 0) + 1
    default_store().compare_set(_failure_key(kind, failures[kind]), "", reason)


def note_alone(reason: str) -> None:
    """Leave the sentence with which this rank has failed, for those that wait in vain for it."""
    default_store().set(_ALONE, reason)


@atexit.register
def _note_leaving() -> None:
    """Leave a note of the user's own error with which this process ends for ranks that wait in vain
    for it."""
    error = getattr(sys, "last_value", None)
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not initialized or isinstance(error, RankError | None) or not _known().of:
        return
    with suppress(RuntimeError, ValueError):
        rank = torch.distributed.get_rank()
        note_alone(f"rank {rank} left with {type(error).__name__}: {error}")


def last_failure_alone() -> str:
    """Return the sentence with which a rank failed last without telling the others; "": none has,
    or the rank that kept the sentences is gone."""
    with suppress(RuntimeError, ValueError):
        store = default_store()
        if store.check([_ALONE]):
            return str(store.get(_ALONE).decode())
    return ""


def waited(members: tuple[int, ...], doing: str) -> str:
    """Tell the other ranks that this one has waited in vain for some, and return where each waited.

    Args:
        members: the ranks that run the model.
        doing: what this rank waited in.

    Returns:
        A text; "": the rank that kept the store is gone.
    """
    with suppress(RuntimeError, ValueError):
        store, keys = default_store(), {one: f"{_WAITED}/{one}" for one in members}
        own = keys[torch.distributed.get_rank()]
        store.set(own, doing)
        _known().words.append(own)
        end_s = time.monotonic() + _LAST_WORDS_S
        while not store.check([*keys.values()]) and time.monotonic() < end_s:
            time.sleep(_LONGEST_LOOK_S / 5)
        places: dict[str, list[int]] = {}
        for rank, key in keys.items():
            place = f"waited while {store.get(key).decode()}" if store.check([key]) else ""
            places.setdefault(place, []).append(rank)
        return "; ".join(
            f"{_listed(ranks)} {place or 'gave no sign yet'}"
            for place, ranks in sorted(places.items())
        )
    return ""


def first_said(members: tuple[int, ...], text: str) -> str:
    """Return the text of the first rank that runs a model and waited in vain for others: this
    rank's own if it is the first, or if the rank that kept the store is gone."""
    with suppress(RuntimeError, ValueError):
        store, key = default_store(), f"{_WAITED} by {_listed([*members])}"
        _known().words.append(key)
        return str(store.compare_set(key, "", text).decode())
    return text


def forget_words() -> None:
    """Delete this rank's messages about waiting in vain: the ranks have met."""
    words = _known().words
    while words:
        with suppress(RuntimeError, ValueError):
            default_store().delete_key(words.pop())


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _failure_key(kind: str, number: int) -> str:
    return f"memopt/failed/{kind}/{number}"


def default_store() -> Any:
    """Return the store of the default process group."""
    return private("torch.distributed.distributed_c10d._get_default_store")()


def timeout() -> timedelta:
    """Return how long the default group's collectives wait for a rank."""
    return timeout_of(torch.distributed.group.WORLD) or _DEFAULT_TIMEOUT


def note_here(key: str) -> None:
    """Note for other ranks that this one has come to `key`."""
    default_store().set(f"{key}/{torch.distributed.get_rank()}", "")


def all_are_here(key: str, members: tuple[int, ...]) -> bool:
    """Wait until all members have noted `key`; return whether they have within the timeout."""
    try:
        default_store().wait([f"{key}/{rank}" for rank in members], timeout())
    except RuntimeError:
        return False
    return True


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(value: torch.Tensor) -> Any:
    return pickle.loads(value.numpy().tobytes())
