"""The parts of the dynamic program and of the ordered replay against their definitions, at whole
numbers; as plain Python, so that nothing is compiled for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from random import Random

import numpy as np
import pytest

from memopt.strategies.offload import dynprog_kernels, ordered_kernels
from memopt.strategies.offload.rounding import RecurrenceData
from tests.mutation.running import plain
from tests.strategies.offload.test_dynprog import random_problem

dynprog, ordered = plain(dynprog_kernels), plain(ordered_kernels)
INF = float("inf")
KEPT, OUT, BACK, IDLE = range(4)


def drawn(rng: Random, n: int) -> RecurrenceData:
    def numbers(least: int, most: int) -> np.ndarray:
        return np.array([rng.randint(least, most) for _ in range(n)], np.float64)

    return RecurrenceData(
        unit_bytes=1.0,
        sizes=numbers(0, 5),
        movable=numbers(0, 3) > 0,
        moved_f=numbers(0, 4),
        moved_b=numbers(0, 4),
        room_f=numbers(3, 12),
        room_b=numbers(3, 12),
        peak_f=numbers(-12, 2),
        peak_b=numbers(-12, 2),
        ratio=rng.choice((0.5, 1.0, 2.0)),
    )


def drawn_label(rng: Random) -> np.ndarray:
    return np.array([rng.randint(low, 7) for low in (0, -7, -7, 0)], np.float64)


def test_idle_time_at_the_turn() -> None:
    """What is late in one direction alone waits for the other's spare time, or for room."""
    rng, late = Random(1), 0
    for _ in range(600):
        data, state = drawn(rng, rng.randint(1, 5)), drawn_label(rng)
        n, last, ratio = len(data.sizes), rng.randint(-1, 5), data.ratio
        kept, out, back, _ = state.tolist()
        expected = max(0.0, out) + max(0.0, back) * ratio
        if (out > 0) != (back > 0):
            lack = out if out > 0 else back
            spare = -back * ratio if out > 0 else -out / ratio
            waits = [0.0, lack - spare]
            for j in range(n):
                passed = data.moved_b[j + 1 :].sum() * ratio
                need = data.peak_b[j]
                if out <= 0:
                    passed = data.moved_f[j + 1 :].sum() / ratio
                    need = data.peak_f[j] + (data.sizes[j] if j == last else 0)
                if passed < spare:
                    waits.append(kept + lack + need - passed)
            expected = max(waits) * (1.0 if out > 0 else ratio)
            late += len(waits) > 2 and max(waits) > max(waits[:2])
        assert dynprog.turning_idle(data, state, last) == expected
    assert late > 60


def test_labels_of_the_next_operation() -> None:
    """Every label is continued in every way that fits, and they are sorted by what is kept."""
    rng, left_out = Random(2), 0
    for _ in range(200):
        n = rng.randint(1, 4)
        data, i, count = drawn(rng, n), rng.randrange(n), rng.randint(0, 4)
        excess, left = dynprog.future(data)
        for k in range(n):
            rooms = [min(data.room_f[j], data.room_b[j]) for j in range(k, n)]
            sums = [data.sizes[k:j].sum() for j in range(k, n)]
            assert excess[k] == max(s - room for s, room in zip(sums, rooms, strict=True))
            assert left[k] == data.moved_f[k:].sum() + data.moved_b[k:].sum() * data.ratio
        assert (excess[n], left[n]) == (-INF, 0.0)
        states = np.array(sorted(drawn_label(rng).tolist() for _ in range(count))).reshape(-1, 4)
        lasts = np.array([rng.randint(-1, i) for _ in range(count)], np.int64)
        limit, least_kept = rng.choice((INF, 6.0)), float(rng.choice((0, 3)))
        expected = []
        for k in range(count):
            for offloaded in (False, True)[: 1 + bool(data.movable[i])]:
                new = np.zeros(4)
                dynprog.advance(data, states[k], i, offloaded, new)
                idle = new[IDLE] + dynprog.remaining(new, i + 1, excess, left, data.ratio)
                room = states[k, KEPT] <= min(data.room_f[i], data.room_b[i])
                if room and new[KEPT] >= least_kept and idle <= limit:
                    last = (i if new[OUT] < 0 else -1) if offloaded else int(lasts[k])
                    expected.append((*new.tolist(), last, 2 * k + offloaded))
        made = np.empty((2 * count, 4)), np.empty(2 * count, np.int64), np.empty(2 * count, int)
        size = dynprog.expand(data, i, states, lasts, count, excess, left, limit, least_kept, *made)
        states, lasts, links = (array[:size].tolist() for array in made)
        found = [(*s, last, link) for s, last, link in zip(states, lasts, links, strict=True)]
        assert sorted(found) == sorted(expected)
        assert [one[KEPT] for one in found] == sorted(one[KEPT] for one in found)
        left_out += size < count * (1 + bool(data.movable[i]))
    assert left_out > 40


@pytest.mark.parametrize("exact", [True, False])
def test_labels_that_are_left(exact: bool) -> None:
    """Those that no label before them dominates, of those that keep less or as much."""
    rng, dropped, cut = Random(3), 0, 0
    for _ in range(200):
        count, ratio = rng.randint(1, 12), rng.choice((0.5, 2.0))
        labels = sorted((drawn_label(rng) for _ in range(count)), key=lambda one: one[KEPT] // 3)
        for one in labels:
            one[KEPT] //= 3
        lasts = np.array([rng.randint(-1, 1) for _ in range(count)], np.int64)
        free_kept, width = float(rng.randint(0, 3)), rng.randint(1, 3)

        def thinned(
            before: list[int],
            group: list[int],
            tolerance: float,
            labels: list[np.ndarray] = labels,
            lasts: np.ndarray = lasts,
            ratio: float = ratio,
        ) -> list[int]:
            stay: list[int] = []
            for k in group:
                if not any(
                    dynprog.dominates(
                        labels[o], lasts[o], labels[k], lasts[k], ratio, exact, tolerance
                    )
                    for o in (*before, *stay)
                ):
                    stay.append(k)
            return stay

        expected, expected_cut = [], 0
        for _, same in groupby(range(count), key=lambda k: float(labels[k][KEPT])):
            by_idle = sorted(same, key=lambda k: float(labels[k][IDLE]))
            free = [k for k in expected if exact and labels[k][KEPT] >= free_kept]
            group, tolerance = thinned(free, by_idle, 0.0), 1.0
            while not exact and len(group) > width:
                fewer = thinned([], group, tolerance)
                expected_cut, group = expected_cut + len(group) - len(fewer), fewer
                tolerance *= 2
            expected += group
        states, links = np.array(labels), np.arange(count, dtype=np.int32)
        found = dynprog.select(states, lasts.copy(), links, count, width, exact, ratio, free_kept)
        assert found == (len(expected), expected_cut)
        assert links[: found[0]].tolist() == expected
        assert (states[: found[0]] == np.array(labels)[expected]).all()
        dropped, cut = dropped + count - len(expected), cut + expected_cut
    assert dropped > 200
    assert (cut > 100) is not exact


def test_room_and_what_may_be_back() -> None:
    """Prefixes of what leaves make room; later operations limit what earlier ones let back."""
    rng, fitting = Random(4), 0
    for _ in range(300):
        n = rng.randint(1, 4)
        amounts = np.array([rng.choice((0, 1, 2, 5)) for _ in range(n + 1)], np.int64)
        need = np.array([rng.randint(-4, 3) for _ in range(2 * n)], np.int64)
        before = [int(amounts[:i].sum()) for i in range(n)]
        both = zip(need[:n], need[::-1][:n], before, strict=True)
        expected = all(max(f, b) <= there for f, b, there in both)
        assert ordered.fits(need, amounts) is expected
        fitting += expected
        last, total = rng.randrange(n + 1), int(amounts.sum())
        away = [total - (int(amounts[last]) if k == last else 0) for k in range(2 * n)]
        allowed = [
            min(total, *(away[j] - int(need[j]) for j in range(k, 2 * n))) if k >= last else 0
            for k in range(2 * n)
        ]
        assert ordered.allowances(need, amounts, last, total).tolist() == allowed
        ends = np.cumsum(amounts) / 2.0
        offloads = np.stack([ends - amounts / 2.0 - 0.25, ends], axis=1)
        for wanted in range(-1, total + 2):
            for whole in (True, False):
                time = ordered.room_time(
                    wanted, whole, amounts, np.cumsum(amounts), offloads, 2.0, 0.25
                )
                if wanted <= 0 or wanted > total:
                    assert time == (0.0 if wanted <= 0 else INF)
                    continue
                j = next(j for j in range(n + 1) if amounts[: j + 1].sum() >= wanted)
                part = (wanted - amounts[:j].sum()) / 2.0
                assert time == (ends[j] if whole else ends[j] - amounts[j] / 2.0 + part)
    assert 30 < fitting < 200


def test_each_transfer_takes_its_latency_and_its_bytes() -> None:
    rng, moved = Random(5), 0
    for _ in range(60):
        problem = replace(random_problem(rng, rng.randint(2, 6)), latency_s=0.25)
        amounts = problem.sizes * problem.movable
        _, offloads, prefetches, end = ordered.replay(problem.arrays, amounts, True)
        if end == INF:
            continue
        for j in np.flatnonzero(amounts):
            size, moved = int(amounts[j]), moved + 1
            out, back = offloads[j], prefetches[j]
            rates = problem.to_host_bytes_per_s, problem.from_host_bytes_per_s
            assert out[1] - out[0] == pytest.approx(0.25 + size / rates[0])
            assert back[1] - back[0] == pytest.approx(0.25 + size / rates[1])
            assert back[0] >= out[1] - 1e-9
            assert end >= back[1]
    assert moved > 60
