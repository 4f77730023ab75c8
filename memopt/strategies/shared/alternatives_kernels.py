"""Compiled loops of Rotor's persistent program with a choice of options at F_all.

C(s, t, m) = min of: keep a^{s-1}, go on to a^{s'-1}, process s'..t, then s..s'-1 (Rotor Theorem
4.8, C1); an option o of stage s: F_all^s, then s+1..t in m - ω_ā[o], then B^s (C2, with a
minimum over o). All sizes in slots, rounded up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@njit(cache=True, nogil=True)
def fill(
    table: Floats,
    choice: Ints,
    slots: int,
    length: int,
    output: Ints,
    saved: Ints,
    save_need: Ints,
    back_need: Ints,
    gradient: Ints,
    walk: Ints,
    seconds: Floats,
    count: Ints,
    forward_sum: Floats,
) -> None:
    """Fill table[s, s + length, m] and choice: -o-1 for option o, s' for a split, 0 for none.

    All shorter lengths must have been filled.
    """
    n = output.size - 1
    for s in range(1, n - length + 1):
        t = s + length
        out = table[s, t]
        pick = choice[s, t]
        for split in range(s + 1, t + 1):
            begin = max(gradient[t] + walk[s, split], output[split - 1])
            extra = forward_sum[split - 1] - forward_sum[s - 1]
            right = table[split, t]
            left = table[s, split - 1]
            shift = output[split - 1]
            for m in range(max(0, begin), slots + 1):
                value = extra + right[m - shift] + left[m]
                if value < out[m]:
                    out[m] = value
                    pick[m] = split
        for o in range(count[s]):
            begin = max(gradient[t] + save_need[s, o], back_need[s, o])
            if s < t:
                begin = max(begin, saved[s, o])
            for m in range(max(0, begin), slots + 1):
                value = seconds[s, o]
                if s < t:
                    value += table[s + 1, t, m - saved[s, o]]
                if value < out[m]:
                    out[m] = value
                    pick[m] = -o - 1
