"""Compiled annealing over sequences of operators in which some run again.

A sequence has every operator once in the graph's order, and repeated runs in between. A reader
takes the latest copy before it, so a sequence stays valid whichever repeated runs are removed or
moved. A copy is in memory from its run to its last reader; a result's first copy to the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solvers.compiled import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NOTHING = -1

PERIOD = 500
"""Steps between two changes of the price of bytes."""
FASTER, SLOWER, STEP = 0.2, 0.8, 1.15
"""Shares of a period's steps over the budget: below the first, bytes get cheaper, above the second
dearer, by the factor STEP."""
LEAST_PRICE, MOST_PRICE = 1e-3, 1e3
ADDED, TAKEN = 0.5, 0.8
"""Shares of the steps: up to ADDED add runs, up to TAKEN remove some, the others move one."""
AT_EXCESS = 0.7
"""How often runs are added for the sake of a position over the budget."""
TRIALS = 200
LATE = 0.8
"""How often added runs come just before the reader, not earlier."""
NEIGHBOURS = 0.3
"""How often some of the repeated runs after a removed one are removed with it."""
REACH = 20.0
"""Standard deviation of a move, in positions."""


class GraphArrays(NamedTuple):
    """A graph as arrays: operators by place in the order, computed tensors by number.

    Attributes:
        reads_at, reads: tensors that operator i reads: reads[reads_at[i]:reads_at[i + 1]].
        writes_at, writes: the same of the tensors that it writes.
        made_by: tensor → operator.
        size: tensor → bytes.
        kept: tensor → whether it is a result.
        scratch: operator → bytes.
        again: operator → whether it may run again.
        seconds: operator → its time.
    """

    reads_at: Ints
    reads: Ints
    writes_at: Ints
    writes: Ints
    made_by: Ints
    size: Ints
    kept: Ints
    scratch: Ints
    again: Ints
    seconds: Floats


@compiled
def memory(sequence: Ints, graph: GraphArrays) -> Ints:
    """Return the bytes at every run of a sequence."""
    length, tensors = sequence.size, graph.size.size
    found = np.zeros(length + 1, np.int64)
    begin = np.full(tensors, NOTHING, np.int64)
    last = np.zeros(tensors, np.int64)
    for position in range(length):
        i = sequence[position]
        for k in range(graph.reads_at[i], graph.reads_at[i + 1]):
            last[graph.reads[k]] = position
        found[position] += graph.scratch[i]
        found[position + 1] -= graph.scratch[i]
        for k in range(graph.writes_at[i], graph.writes_at[i + 1]):
            t = graph.writes[k]
            if begin[t] != NOTHING:
                if graph.kept[t]:
                    # Written beside the result, and freed after the run.
                    found[position] += graph.size[t]
                    found[position + 1] -= graph.size[t]
                    continue
                found[begin[t]] += graph.size[t]
                found[last[t] + 1] -= graph.size[t]
            begin[t] = last[t] = position
    for t in range(tensors):
        if begin[t] != NOTHING:
            found[begin[t]] += graph.size[t]
            found[length if graph.kept[t] else last[t] + 1] -= graph.size[t]
    total = np.int64(0)
    for position in range(length):
        total += found[position]
        found[position] = total
    return found[:length]


@compiled
def excess(need: Ints, budget: int) -> float:
    """Sum the bytes over the budget at every run."""
    total = 0.0
    for position in range(need.size):
        if need[position] > budget:
            total += need[position] - budget
    return total


@compiled
def time_of(sequence: Ints, graph: GraphArrays) -> float:
    """Return the seconds of a sequence."""
    total = 0.0
    for position in range(sequence.size):
        total += graph.seconds[sequence[position]]
    return total


@compiled
def without_useless(sequence: Ints, graph: GraphArrays) -> Ints:
    """Leave out repeated runs that nothing reads from."""
    needed = np.zeros(graph.size.size, np.bool_)
    again = repeated(sequence, graph)
    stays = np.ones(sequence.size, np.bool_)
    for position in range(sequence.size - 1, -1, -1):
        i = sequence[position]
        useful = not again[position]
        for k in range(graph.writes_at[i], graph.writes_at[i + 1]):
            useful = useful or (needed[graph.writes[k]] and not graph.kept[graph.writes[k]])
        stays[position] = useful
        if useful:
            for k in range(graph.writes_at[i], graph.writes_at[i + 1]):
                needed[graph.writes[k]] = False
            for k in range(graph.reads_at[i], graph.reads_at[i + 1]):
                needed[graph.reads[k]] = True
    return sequence[stays]


@compiled
def repeated(sequence: Ints, graph: GraphArrays) -> npt.NDArray[np.bool_]:
    """Tell for every position whether its operator ran before."""
    seen = np.zeros(graph.again.size, np.bool_)
    found = np.zeros(sequence.size, np.bool_)
    for position in range(sequence.size):
        found[position] = seen[sequence[position]]
        seen[sequence[position]] = True
    return found


@compiled
def next_reads(sequence: Ints, at: int, graph: GraphArrays) -> Ints:
    """Return, for every tensor that is in memory before position `at`, the position of its copy's
    next reader: the sequence's length for results, NOTHING without a reader or a copy."""
    found = np.full(graph.size.size, NOTHING, np.int64)
    for position in range(at):
        i = sequence[position]
        for k in range(graph.writes_at[i], graph.writes_at[i + 1]):
            if graph.kept[graph.writes[k]]:
                found[graph.writes[k]] = sequence.size
    gone = np.zeros(graph.size.size, np.bool_)
    for position in range(at, sequence.size):
        i = sequence[position]
        for k in range(graph.reads_at[i], graph.reads_at[i + 1]):
            t = graph.reads[k]
            if not gone[t] and found[t] == NOTHING:
                found[t] = position
        for k in range(graph.writes_at[i], graph.writes_at[i + 1]):
            gone[graph.writes[k]] = True
    return found


@compiled
def some_position(need: Ints, budget: int) -> int:
    """Draw a position, often one over the budget."""
    found = np.random.randint(0, need.size)
    if np.random.random() < AT_EXCESS:
        for _ in range(TRIALS):
            if need[found] > budget:
                break
            found = np.random.randint(0, need.size)
    return found


@compiled
def some_tensor(at: int, i: int, ahead: Ints, graph: GraphArrays) -> int:
    """Draw a tensor that need not be in memory at a position, large ones that are read late more
    often; NOTHING if there is none.

    Args:
        at: the position.
        i: the operator there.
        ahead: `next_reads` after it.
    """
    used = np.zeros(graph.size.size, np.bool_)
    for k in range(graph.reads_at[i], graph.reads_at[i + 1]):
        used[graph.reads[k]] = True
    total, found = 0.0, NOTHING
    for t in range(graph.size.size):
        maker = graph.made_by[t]
        if ahead[t] == NOTHING or graph.kept[t] or used[t] or maker == i or not graph.again[maker]:
            continue
        weight = float(graph.size[t]) * (ahead[t] - at)
        total += weight
        if np.random.random() * total < weight:
            found = t
    return found


@compiled
def with_runs(sequence: Ints, at: int, first: int, share: float, graph: GraphArrays) -> Ints:
    """Run operator `first` again at a position, and before it a random share of the operators that
    make its operands, and so on, if these are not in memory anyway."""
    ahead = next_reads(sequence, at, graph)
    chosen = np.zeros(graph.again.size, np.bool_)
    chosen[first] = True
    for i in range(first, -1, -1):
        if chosen[i]:
            for k in range(graph.reads_at[i], graph.reads_at[i + 1]):
                maker = graph.made_by[graph.reads[k]]
                if ahead[graph.reads[k]] == NOTHING and graph.again[maker]:
                    chosen[maker] = chosen[maker] or np.random.random() < share
    more = np.nonzero(chosen)[0]
    return np.concatenate((sequence[:at], more, sequence[at:]))


@compiled
def with_more(sequence: Ints, need: Ints, budget: int, graph: GraphArrays) -> Ints:
    """Split the lifetime of a tensor: run an operator again before the tensor's next reader."""
    at = some_position(need, budget)
    ahead = next_reads(sequence, at + 1, graph)
    t = some_tensor(at, sequence[at], ahead, graph)
    if t == NOTHING:
        return sequence
    place = ahead[t]
    if np.random.random() > LATE:
        place = np.random.randint(at + 1, place + 1)
    return with_runs(sequence, place, graph.made_by[t], np.random.random(), graph)


@compiled
def with_less(sequence: Ints, again: npt.NDArray[np.bool_], at: int) -> Ints:
    """Remove the repeated run at a position, and sometimes some that follow it directly."""
    end = at + 1
    if np.random.random() < NEIGHBOURS:
        most = at + 1 + np.random.randint(1, 4)
        while end < min(most, sequence.size) and again[end]:
            end += 1
    return np.concatenate((sequence[:at], sequence[end:]))


@compiled
def with_moved(sequence: Ints, at: int) -> Ints:
    """Move the repeated run at a position, not before an earlier run of the same operator."""
    i, lowest = sequence[at], at
    while sequence[lowest - 1] != i:
        lowest -= 1
    to = at + int(np.round(np.random.standard_normal() * REACH))
    to = min(max(to, lowest), sequence.size - 1)
    rest = np.concatenate((sequence[:at], sequence[at + 1 :]))
    return np.concatenate((rest[:to], sequence[at : at + 1], rest[to:]))


@compiled
def changed(sequence: Ints, need: Ints, budget: int, graph: GraphArrays) -> Ints:
    """Draw a neighbour of a sequence."""
    again = repeated(sequence, graph)
    positions = np.nonzero(again)[0]
    draw = np.random.random()
    if positions.size == 0 or draw < ADDED:
        found = with_more(sequence, need, budget, graph)
    else:
        at = positions[np.random.randint(0, positions.size)]
        found = with_less(sequence, again, at) if draw < TAKEN else with_moved(sequence, at)
    return without_useless(found, graph)


@compiled
def annealed(
    sequence: Ints,
    graph: GraphArrays,
    budget: int,
    steps: int,
    warmth: tuple[float, float],
    price: float,
    seed: int,
) -> tuple[Ints, float, Ints]:
    """Anneal repeated runs at a price for bytes beyond the budget, which rises while there are
    such bytes and falls while there are none.

    Args:
        sequence: to start from.
        budget: bytes, without what is resident.
        steps: neighbours tried.
        warmth: at the beginning and at the end, in mean times of an operator.
        price: mean times of an operator for the mean size of a tensor, at one run.
        seed: of all that is random.

    Returns:
        The last sequence, the last price, and the fastest sequence within the budget (empty: none).
    """
    np.random.seed(seed)
    unit_s = max(graph.seconds.mean(), 1e-30)
    unit_bytes = max(graph.size.mean(), 1e-30)
    most = 4 * graph.again.size + 16
    need = memory(sequence, graph)
    over, seconds = excess(need, budget), time_of(sequence, graph)
    best, best_s, beyond = sequence[:0], np.inf, 0
    if over == 0:
        best, best_s = sequence, seconds
    for step in range(steps):
        trial = changed(sequence, need, budget, graph)
        trial_need = memory(trial, graph)
        trial_over, trial_s = excess(trial_need, budget), time_of(trial, graph)
        worse = (trial_s - seconds) / unit_s + price * (trial_over - over) / unit_bytes
        now = warmth[0] * (warmth[1] / warmth[0]) ** (step / steps)
        if trial.size <= most and (worse <= 0 or np.random.random() < np.exp(-worse / now)):
            sequence, need, over, seconds = trial, trial_need, trial_over, trial_s
            if over == 0 and seconds < best_s:
                best, best_s = sequence, seconds
        beyond += over > 0
        if step % PERIOD == PERIOD - 1:
            if beyond > SLOWER * PERIOD:
                price = min(price * STEP, MOST_PRICE)
            elif beyond < FASTER * PERIOD:
                price = max(price / STEP, LEAST_PRICE)
            beyond = 0
    return sequence, price, best
