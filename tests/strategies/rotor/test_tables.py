"""The compiled tables against their definitions: step functions point by point, tables of slots by
plain recursion, in blocks beside tables of steps, and every schedule that is read out of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from memopt.models.chain import Chain, Stage
from memopt.reductions.chain_replay import replay_chain
from memopt.solvers.running import Deadline
from memopt.strategies.rotor import tables
from memopt.strategies.rotor.model import ChainArrays, options_of
from memopt.strategies.rotor.persistent_kernels import Rows, memory_bounds, row
from memopt.strategies.rotor.persistent_trace_kernels import persistent_schedule
from memopt.strategies.rotor.schedule_cost_kernels import peak_and_time
from memopt.strategies.rotor.schedules import CODE_BASE, MOVES, SolveLimits, steps_of
from memopt.strategies.rotor.steps_kernels import FAR, Steps, buffer, constant, evaluate, improve
from memopt.strategies.rotor.tables import SlotTable, _exact_table, _nothing_known
from tests.models.training_graphs import random_schedule
from tests.strategies.rotor.chains import random_chain

INF = float("inf")
OVERHEADS = (
    "forward_overhead_bytes",
    "forward_no_save_overhead_bytes",
    "backward_overhead_bytes",
)
LIMITS = SolveLimits(2**30, Deadline(INF))


def arrays(chain: Chain, slot: int) -> ChainArrays:
    return ChainArrays.of(chain, slot)


def costly_forwards(seed: int, chain: Chain) -> Chain:
    """For two of three seeds, a chain where what saves nothing needs most memory: its input is
    large, or some stages have much workspace."""
    if seed % 3 == 0:
        return replace(chain, input_bytes=90)
    if seed % 3 == 1:
        stages = list(chain.stages)
        for i in range(seed % 4, len(stages), 3):
            stages[i] = replace(stages[i], forward_no_save_overhead_bytes=25 + i)
        return replace(chain, stages=tuple(stages))
    return chain


def with_options(seed: int, c: ChainArrays) -> ChainArrays:
    """For every other seed, stages that may also be saved in up to two more ways."""
    dice, shape = Random(seed), (c.length + 1, 3)
    if seed % 2:
        return c

    def drawn(plain: np.ndarray, most: int) -> np.ndarray:
        more = [[0, dice.randint(-most, most), dice.randint(-most, most)] for _ in range(shape[0])]
        return np.maximum(0, plain[:, None] + np.array(more, plain.dtype))

    count = np.array([dice.randint(1, 3) for _ in range(shape[0])], np.int64)
    sizes = (drawn(size, 4) for size in (c.saved_bytes, c.saving, c.reverse))
    own_s = drawn(c.forward_s + c.backward_s, 3)
    return c._replace(options=options_of(count, *sizes, own_s, c.slot))


def slot_table(c: ChainArrays, split_saving: bool) -> Rows:
    part = SlotTable(c.slot, None, 0.0, 1.0)
    return tables.slot_table(c, split_saving, LIMITS, part)


def exact_table(c: ChainArrays, split_saving: bool) -> Rows:
    floor, high = memory_bounds(c, 1, split_saving)
    return _exact_table(c, floor, high, split_saving, LIMITS)


def drawn_steps(dice: Random, most: int, unit: int) -> Steps:
    at = [unit * m for m in sorted(dice.sample(range(-5, 25), dice.randint(0, most)))]
    value = sorted(dice.sample(range(40), len(at)), reverse=True)
    return Steps(np.array(at, np.int64), np.array(value, np.float64))


def test_improved_steps_point_by_point() -> None:
    changed = 0
    for seed in range(400):
        dice, unit = Random(seed), (1, 10**12)[seed % 2]
        current, a, b = (drawn_steps(dice, 6, unit) for _ in range(3))
        a_shift, b_shift, start = (unit * dice.randint(-3, 6) for _ in range(3))
        extra = float(dice.randint(-8, 8))
        if seed % 5 == 0:
            a, start = constant(0.0), -FAR if seed % 10 else start
        out = buffer(len(current.at) + len(a.at) + len(b.at) + 1)
        count = improve(out, current, a, a_shift, b, b_shift, start, extra, 1e-9)
        found = Steps(out.at[:count], out.value[:count]) if count else current
        changed += count > 0
        for memory in range(-12 * unit, 45 * unit, unit):
            both = INF
            if memory >= start:
                both = evaluate(a, memory - a_shift) + evaluate(b, memory - b_shift) + extra
            expected = min(evaluate(current, memory), both)
            assert evaluate(found, memory) == expected, (seed, memory)
        assert (np.diff(found.at) > 0).all()
        assert (np.diff(found.value) < 0).all()
    assert changed > 150


@pytest.mark.parametrize("split_saving", [True, False])
@pytest.mark.parametrize("slot", [1, 3])
def test_tables_of_slots_by_recursion(slot: int, split_saving: bool) -> None:
    """C(s, t, m) as Theorem 4.8 has it, at every memory of every row and beyond its ends."""
    for seed in range(60):
        c = with_options(seed, arrays(random_chain(seed), slot))
        n = c.length

        @cache
        def least(s: int, t: int, m: int, c: ChainArrays = c) -> float:
            best, ways = INF, c.options
            for o in range(ways.number[s]):
                need = max(c.gradient[t] + ways.saving[s, o], ways.reverse[s, o])
                if m >= -(-need // c.slot) and (s == t or split_saving):
                    left = m - int(ways.saved[s, o])
                    rest = 0.0 if s == t else least(s + 1, t, left)
                    best = min(best, ways.own_s[s, o] + rest)
            for split in range(s + 1, t + 1):
                bytes_ = max(c.first[s], *c.running[s + 1 : split], c.first[s])
                if m >= -(-(c.gradient[t] + bytes_) // c.slot):
                    again = sum(c.forward_s[s:split])
                    later = least(split, t, m - int(c.output[split - 1]))
                    best = min(best, least(s, split - 1, m) + later + again)
            return float(best)

        table = slot_table(c, split_saving)
        for s in range(1, n + 1):
            for t in range(s, n + 1):
                low, high = int(table.low[s, t]), int(table.high[s, t])
                assert least(s, t, low - 1) == INF
                expected = [least(s, t, m) for m in range(low, high + 1)]
                assert expected[0] < INF
                assert row(table, s, t).tolist() == pytest.approx(expected), (seed, s, t)
                assert least(s, t, high + 9) == pytest.approx(expected[-1])


@pytest.mark.parametrize("split_saving", [True, False])
def test_tables_in_blocks_are_those_of_steps(split_saving: bool) -> None:
    """Chains of several blocks, at slots of one byte."""
    for seed in range(6):
        c = with_options(seed, arrays(random_chain(500 + seed, most_stages=26), 1))
        n = c.length
        slots, steps = slot_table(c, split_saving), exact_table(c, split_saving)
        for s in range(1, n + 1):
            for t in range(s, n + 1):
                begin, count = steps.offset[s, t], steps.steps[s, t]
                known = Steps(steps.at[begin : begin + count], steps.values[begin : begin + count])
                low, high = slots.low[s, t], slots.high[s, t]
                assert known.at[0] == low
                expected = [evaluate(known, m) for m in range(low, high + 1)]
                assert row(slots, s, t).tolist() == pytest.approx(expected), (seed, s, t)


@pytest.mark.parametrize("split_saving", [True, False])
@pytest.mark.parametrize("slot", [None, 1, 3])
def test_schedules_at_every_memory(slot: int | None, split_saving: bool) -> None:
    """What a table promises, its schedules keep: within the memory, in no more time."""
    longest = 0
    for seed in range(12):
        chain = costly_forwards(seed, random_chain(700 + seed, most_stages=12))
        c = arrays(chain, slot or 1)
        table = slot_table(c, split_saving) if slot else exact_table(c, split_saving)
        floor, high = memory_bounds(c, 1, split_saving)
        fixed = chain.resident_bytes + chain.input_bytes
        least = int(floor[1, c.length])
        below = persistent_schedule(c, table, floor, least - 1, split_saving, False)[0]
        assert below.size == 0
        for memory in range(floor[1, c.length], high[1, c.length] + 2):
            codes = persistent_schedule(c, table, floor, int(memory), split_saving, False)[0]
            timeline = replay_chain(chain, steps_of(codes))
            assert timeline.peak_bytes - fixed <= memory
            assert peak_and_time(c, codes) == (
                timeline.peak_bytes - fixed,
                pytest.approx(timeline.time_s),
            )
            longest = max(longest, len(codes) - 2 * c.length)
            start = table.offset[1, c.length]
            if slot is None:
                end = start + table.steps[1, c.length]
                known = Steps(table.at[start:end], table.values[start:end])
                assert timeline.time_s == pytest.approx(evaluate(known, memory))
            elif memory // slot >= table.low[1, c.length]:
                index = min(memory // slot, table.high[1, c.length]) - table.low[1, c.length]
                assert timeline.time_s <= table.values[start + index] + 1e-9
    assert longest > 10


def test_a_long_schedule() -> None:
    """Sixty equal stages at the least memory are computed some thousand times in all."""
    stages = [Stage(1.0, 1.0, 1, 1, 1) for _ in range(60)]
    chain = Chain(1, stages)
    c = arrays(chain, 1)
    floor, _ = memory_bounds(c, 1, True)
    least = int(floor[1, 60])
    codes = persistent_schedule(c, _nothing_known(floor), floor, least, True, False)[0]
    timeline = replay_chain(chain, steps_of(codes))
    assert len(codes) > 16 * 60 + 64
    assert timeline.peak_bytes == least + chain.input_bytes


def test_the_cost_of_any_schedule() -> None:
    """Those with drops, too, which no table makes."""
    dropped = 0
    for seed in range(120):
        chain = random_chain(seed)
        if seed % 2:
            # The peak is where nothing is saved.
            stages = [replace(x, forward_no_save_overhead_bytes=99) for x in chain.stages]
            chain = replace(chain, stages=tuple(stages))
        if seed % 4 == 2:
            # The peak is where something is dropped.
            less = dict.fromkeys(OVERHEADS, -99)
            chain = replace(chain, stages=tuple(replace(x, **less) for x in chain.stages))
        steps = random_schedule(chain, seed, detours=0.3)
        c = arrays(chain, 1)
        timeline = replay_chain(chain, steps)
        codes = [CODE_BASE * step.stage + MOVES.index(step.move) for step in steps]
        peak, seconds = peak_and_time(c, np.array(codes, np.int64))
        assert peak + chain.resident_bytes + chain.input_bytes == timeline.peak_bytes
        assert seconds == pytest.approx(timeline.time_s)
        assert steps_of(codes) == steps
        dropped += any("drop" in step.move for step in steps)
    assert dropped > 20
