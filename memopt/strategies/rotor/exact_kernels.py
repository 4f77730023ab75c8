"""The persistent program (Rotor Theorem 4.8) in exact memory: its rows are step functions."""

from __future__ import annotations

import numpy as np

from memopt.strategies.rotor.compiled import compiled_unlocked
from memopt.strategies.rotor.model import ChainArrays, Int64Array
from memopt.strategies.rotor.persistent_kernels import saving_need
from memopt.strategies.rotor.steps_kernels import FAR, Steps, constant, cut, improve, with_room


@compiled_unlocked
def fill_stage(
    c: ChainArrays,
    pool: Steps,
    offset: Int64Array,
    count: Int64Array,
    used: int,
    s: int,
    split_saving: bool,
    most: int,
    tolerance: float,
) -> tuple[Steps, int]:
    """Append the rows (s, s) ... (s, n) to the pool; stages above s are there.

    Returns the pool, which may have moved, and the steps used: -1 if they would pass `most`.
    """
    buffer = Steps(np.empty(256, np.int64), np.empty(256))
    other = Steps(np.empty(256, np.int64), np.empty(256))
    zero = constant(0.0)
    own = c.forward_s[s] + c.backward_s[s]
    for t in range(s, c.length + 1):
        k = 0
        if s == t:
            buffer.at[0] = saving_need(c, s, t, 1)
            buffer.value[0] = own
            k = 1
        elif split_saving:
            begin = offset[s + 1, t]
            end = begin + count[s + 1, t]
            rest = Steps(pool.at[begin:end], pool.value[begin:end])
            buffer = with_room(buffer, 0, rest.at.size + 2)
            need = saving_need(c, s, t, 1)
            none = cut(buffer, 0)
            k = improve(buffer, none, rest, c.saved[s], zero, -FAR, need, own, tolerance)
        need = c.first[s]
        for split in range(s + 1, t + 1):
            if split > s + 1:
                need = max(need, c.running[split - 1])
            begin = offset[s, split - 1]
            end = begin + count[s, split - 1]
            left = Steps(pool.at[begin:end], pool.value[begin:end])
            begin = offset[split, t]
            end = begin + count[split, t]
            right = Steps(pool.at[begin:end], pool.value[begin:end])
            other = with_room(other, 0, k + left.at.size + right.at.size + 2)
            start = c.gradient[t] + need
            extra = c.forward_sum_s[split - 1] - c.forward_sum_s[s - 1]
            shift = c.output[split - 1]
            m = improve(other, cut(buffer, k), left, 0, right, shift, start, extra, tolerance)
            if m > 0:
                buffer, other, k = other, buffer, m
        if used + k > most:
            return pool, -1
        pool = with_room(pool, used, k)
        pool.at[used : used + k] = buffer.at[:k]
        pool.value[used : used + k] = buffer.value[:k]
        offset[s, t] = used
        count[s, t] = k
        used += k
    return pool, used
