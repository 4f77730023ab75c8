"""Messages between ranks, here threads of one process: what one leaves for the others when it
fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from memopt.errors import RankError
from memopt.step import rank_groups
from memopt.step import ranks as ranks_of_steps
from memopt.step.rank_groups import RankGroup
from memopt.step.ranks import telling_ranks
from tests.distributed.gloo import OneThread

MEMBERS = (0, 1)
MODEL = "a model"


@contextmanager
def ranks() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Run what each of two ranks does, at the same time."""
    own, store = threading.local(), dist.HashStore()
    groups = [RankGroup(MEMBERS, {}), RankGroup(MEMBERS, {})]

    def run(rank: int, work: Callable[[RankGroup], Any]) -> Any:
        own.rank = rank
        return work(groups[rank])

    with (
        mock.patch.object(rank_groups, "default_store", return_value=store),
        mock.patch.object(rank_groups, "timeout", return_value=timedelta(minutes=5)),
        mock.patch.object(dist, "get_rank", side_effect=lambda: own.rank),
        mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", OneThread),
        ThreadPoolExecutor(2) as pool,
    ):

        def both(first: Any, second: Any) -> tuple[Any, Any]:
            ends = [pool.submit(run, 0, first), pool.submit(run, 1, second)]
            return ends[0].result(), ends[1].result()

        yield both


def says(value: Any, kind: str = MODEL) -> Callable[[RankGroup], Any]:
    return lambda group: group.gathered(value, kind)


def waits(group: RankGroup) -> str:
    """What a rank is told that waits for one that does not come."""
    try:
        group.gathered("here", MODEL)
    except RankError as error:
        return str(error)
    except RuntimeError as error:
        return group.close(f"lost: {error}")
    return "met"


def test_a_known_model_and_a_new_one() -> None:
    with ranks() as both:
        both(says(1), says(2))
        assert both(says("known"), says("new", "another")) == (["known", "new"],) * 2


def test_values_of_all_ranks_in_their_order() -> None:
    with ranks() as both:
        assert both(says("a"), says({"b": [1] * 1000})) == (["a", {"b": [1] * 1000}],) * 2
        assert both(
            lambda group: group.from_first("of the first", MODEL),
            lambda group: group.from_first(None, MODEL),
        ) == ("of the first", "of the first")


@pytest.mark.parametrize("met", [False, True])
def test_a_rank_that_fails_is_quoted_and_not_waited_for(met: bool) -> None:
    with ranks() as both:
        if met:
            both(says(0), says(1))
        told, own = both(waits, lambda group: group.close("rank 1 failed"))
        assert (told, own) == ("rank 1 failed", "rank 1 failed")
        # The next message makes a group anew.
        assert both(says(2), says(3)) == ([2, 3], [2, 3])


def test_all_fail_alike_and_go_on() -> None:
    with ranks() as both:
        both(says(0), says(1))
        both(lambda group: group.close("rank 0 failed"), lambda group: group.close("rank 1 failed"))
        assert both(says(2), says(3)) == ([2, 3], [2, 3])


def test_ranks_with_different_models_meet_and_tell() -> None:
    with ranks() as both:
        assert both(says("a", "one"), says("b", "another")) == (["a", "b"], ["a", "b"])


def test_ranks_at_different_places_quote_the_step_that_failed_before() -> None:
    """A loop that goes on from an error of its step meets the others elsewhere."""

    def comes(doing: str, failed: str = "") -> Callable[[RankGroup], str]:
        def call(group: RankGroup) -> str:
            ranks = ranks_of_steps.Ranks(MEMBERS, group, MODEL)
            if failed:
                ranks.report_failure(failed)
            with pytest.raises(RankError) as caught:
                ranks.exchanged(None, doing)
            return str(caught.value)

        return call

    kept = {}

    def store() -> Any:
        return kept.setdefault("store", rank_groups.default_store())

    with (
        ranks() as both,
        mock.patch.object(ranks_of_steps, "default_store", store),
        mock.patch.object(ranks_of_steps, "forget_words"),
    ):
        told = both(comes("a forward runs"), comes("a call begins", "failed: KeyError: 1"))
        for one in told:
            assert one.endswith("Before that, rank 1 failed: KeyError: 1")


@pytest.mark.parametrize("met_before", [False, True])
def test_one_that_has_met_such_a_model_before_tells_its_ranks(met_before: bool) -> None:
    with ranks() as both:
        both(says(0), says(1))

        def fails(group: RankGroup) -> None:
            met = {MODEL: MEMBERS} if met_before else {}
            known = rank_groups._Groups({MEMBERS: group}, group.failures, met)
            with mock.patch.object(rank_groups, "_known", return_value=known):
                rank_groups.fail_alone((), MODEL, "rank 1 failed")
            if not met_before:  # nobody hears it, who has met this rank already
                group.close("the end")

        assert both(waits, fails) == ("rank 1 failed" if met_before else "the end", None)
        assert rank_groups.last_failure_alone() == "rank 1 failed"
        if met_before:
            assert both(says(2), says(3)) == ([2, 3], [2, 3])


def test_one_that_does_not_know_the_others_is_heard_before_they_meet() -> None:
    with ranks() as both:
        both(says(0, "another model"), says(1, "another model"))

        def fails(group: RankGroup) -> None:
            known = rank_groups._Groups({}, group.failures)
            with mock.patch.object(rank_groups, "_known", return_value=known):
                rank_groups.fail_alone((), MODEL, "rank 1 failed")

        assert both(waits, fails) == ("rank 1 failed", None)
        assert both(says(2), says(3)) == ([2, 3], [2, 3])


def _told() -> None:
    raise RankError("rank 1 failed")


def _own() -> None:
    raise ValueError("of its own")


def _from_it() -> None:
    try:
        _told()
    except RankError as error:
        raise ValueError("from it") from error


def test_what_fails_while_a_told_error_is_handled_is_told_too() -> None:
    """A rank that falls back after the others' failure, and fails then, leaves nobody waiting."""
    told: list[str] = []
    model = nn.Linear(1, 1)
    with (
        mock.patch.object(ranks_of_steps, "several_are_there", return_value=True),
        mock.patch.object(ranks_of_steps, "members_of", return_value=MEMBERS),
        mock.patch.object(ranks_of_steps, "fail_alone", side_effect=lambda *a: told.append(a[-1])),
        mock.patch.object(dist, "get_rank", return_value=0),
    ):
        try:
            _told()
        except RankError:
            with pytest.raises(ValueError, match="of its own"), telling_ranks(model, "planning"):
                _own()
        with pytest.raises(ValueError, match="from it"), telling_ranks(model, "planning"):
            _from_it()
    assert told == ["rank 0 failed while planning: ValueError: of its own"]
