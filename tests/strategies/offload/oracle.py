"""Independent oracles of the offloading model: a linear program over event times, brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
from scipy.optimize import linprog

from memopt.models.chain import Chain, Stage
from memopt.models.device import Device

TOLERANCE = 1e-7


def paper_link(bytes_per_s: float) -> Device:
    """One transfer at a time, no latency (Offloading §3.1)."""
    return Device(name="link", to_host_bytes_per_s=bytes_per_s, duplex=False)


def random_chain(rng: random.Random, stages: int, *, zero_share: float = 0.1) -> Chain:
    def size(top: int) -> int:
        return 0 if rng.random() < zero_share else rng.randint(1, top)

    def seconds() -> float:
        return 0.0 if rng.random() < zero_share else float(rng.randint(1, 8))

    return Chain(
        input_bytes=size(10),
        stages=[
            Stage(
                seconds(),
                seconds(),
                output_bytes=1,
                saved_bytes=size(10),
                gradient_bytes=size(4),
                forward_overhead_bytes=size(4),
                backward_overhead_bytes=size(5),
                parameter_gradient_bytes=size(2) if rng.random() < 0.3 else 0,
            )
            for _ in range(stages)
        ],
        resident_bytes=rng.choice([0, 5]),
        input_gradient_bytes=size(3),
    )


class Step:
    """The step's operations spelled out from Offloading §3.1, without the package's code."""

    def __init__(self, chain: Chain) -> None:
        n = len(chain.stages)
        self.n = n
        self.x = [chain.input_bytes] + [s.saved_bytes for s in chain.stages]
        self.operations = [("F", i) for i in range(n)] + [("B", i) for i in reversed(range(n))]
        self.time = []
        self.used = []
        g = [s.parameter_gradient_bytes for s in chain.stages]
        y = [chain.gradient_bytes(i) for i in range(n + 1)]
        for kind, i in self.operations:
            stage = chain.stages[i]
            made = sum(self.x[: i + 2])
            if kind == "F":
                self.time.append(stage.forward_time_s)
                self.used.append(made + stage.forward_overhead_bytes)
            else:
                self.time.append(stage.backward_time_s)
                gradients = y[i] + y[i + 1] + sum(g[i:])
                self.used.append(made + gradients + stage.backward_overhead_bytes)

    def reads(self, k: int, j: int) -> bool:
        """Whether operation k touches x_j."""
        return j in (self.operations[k][1], self.operations[k][1] + 1)


def lp_makespan(
    chain: Chain, budget: int, device: Device, amounts: dict[int, int] | None, movable: list[int]
) -> float | None:
    """The least makespan when data may move in any parts at any time, or None.

    Variables: the wait before every operation, and for every x_j the bytes that leave and return
    in each wait and each operation. amounts: total bytes that leave of each x_j; None: free.
    """
    step = Step(chain)
    capacity = budget - chain.resident_bytes
    count = len(step.operations)
    spans = 2 * count  # span 2k: the wait before operation k; span 2k+1: operation k
    wait = {k: k for k in range(count)}
    size = count
    out: dict[tuple[int, int], int] = {}
    back: dict[tuple[int, int], int] = {}
    for j in movable:
        for span in range(spans):
            out[j, span], back[j, span] = size, size + 1
            size += 2
    rows, limits, equal, values = [], [], [], []

    def at_most(entries: list[tuple[int, float]], limit: float) -> None:
        row = np.zeros(size)
        for column, value in entries:
            row[column] += value
        rows.append(row)
        limits.append(limit)

    for span in range(spans):  # one link
        entries = [(out[j, span], 1 / device.to_host_bytes_per_s) for j in movable]
        entries += [(back[j, span], 1 / device.swap_in_bytes_per_s) for j in movable]
        k = span // 2
        if span % 2 == 0:
            at_most([*entries, (wait[k], -1.0)], 0)
        else:
            at_most(entries, step.time[k])
    for j in movable:
        produced = 2 * (j - 1) + 1 if j else -1
        for span in range(produced + 1):
            at_most([(out[j, span], 1.0)], 0)
        for span in range(spans):  # what returns has left
            entries = [(back[j, s], 1.0) for s in range(span + 1)]
            at_most(entries + [(out[j, s], -1.0) for s in range(span + 1)], 0)
        freed = next((k for k, op in enumerate(step.operations) if op == ("B", j - 1)), count)
        for k in range(count):  # a backward reader has all of it
            if step.operations[k][0] == "B" and step.reads(k, j):
                entries = [(out[j, s], 1.0) for s in range(spans)]
                at_most(entries + [(back[j, s], -1.0) for s in range(2 * k + 1)], 0)
        for span in range(2 * freed, spans):
            at_most([(out[j, span], 1.0)], 0)
        row = np.zeros(size)
        for span in range(spans):
            row[out[j, span]] = 1.0
        if amounts is None:
            at_most([(c, 1.0) for c in np.flatnonzero(row)], step.x[j])
        else:
            equal.append(row)
            values.append(amounts.get(j, 0))
    for k in range(count):  # memory when the operation starts and when it ends
        away = [j for j in movable if j < step.operations[k][1]]
        for end, span in ((0, 2 * k), (1, 2 * k + 1)):
            del end
            entries = [(out[j, s], -1.0) for j in away for s in range(span + 1)]
            # What has returned occupies memory, also of activations this operation reads
            # while their first copy is still there.
            here = [j for j in movable if step.operations[k][0] == "F" or j in away]
            entries += [(back[j, s], 1.0) for j in here for s in range(span + 1)]
            at_most(entries, capacity - step.used[k])
    cost = np.zeros(size)
    cost[:count] = 1.0
    result = linprog(
        cost,
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.array(equal) if equal else None,
        b_eq=np.array(values) if equal else None,
        method="highs",
    )
    if result.status == 2:
        return None
    assert result.status == 0, result.message
    return float(result.fun) + sum(step.time)


def subsets(indices: list[int]):
    return itertools.chain.from_iterable(
        itertools.combinations(indices, r) for r in range(len(indices) + 1)
    )


def ordered_lp_makespan(
    chain: Chain, budget: int, device: Device, amounts: dict[int, int]
) -> float | None:
    """The least makespan of ordered schedules of the given amounts, with interruptions, or None.

    All that leaves does so by increasing index, and before anything returns, by decreasing
    index. One linear program for each span in which the direction of the link changes;
    variables: the wait before every operation, bytes that leave and return in every span.
    """
    step = Step(chain)
    chosen = sorted(j for j, size in amounts.items() if size)
    total = sum(amounts.values())
    count = len(step.operations)
    best: float | None = None
    # What has left can be missed by an operation on x_i, x_{i+1} only if its index is below i.
    missed = [sum(amounts[j] for j in chosen if j < i) for _, i in step.operations]
    need = [used - (budget - chain.resident_bytes) for used in step.used]
    if any(need[k] > missed[k] for k in range(count)):
        return None
    first = 2 * (chosen[-1] - 1) + 2 if chosen and chosen[-1] else 0
    for turn in range(first, 2 * count):
        value = _ordered_lp(step, device, amounts, turn, missed, need, total)
        if value is not None and (best is None or value < best):
            best = value
        if not chosen:
            break
    return best


def _ordered_lp(step, device, amounts, turn, missed, need, total):
    count = len(step.operations)
    spans = 2 * count
    rows, limits = [], []
    out, back = (lambda s: count + s), (lambda s: count + spans + s)
    size = count + 2 * spans
    bounds = [(0, None)] * size

    def at_most(entries, limit):
        row = np.zeros(size)
        for column, value in entries:
            row[column] += value
        rows.append(row)
        limits.append(limit)

    for span in range(spans):
        if span > turn:
            bounds[out(span)] = (0, 0)
        if span < turn:
            bounds[back(span)] = (0, 0)
        entries = [
            (out(span), 1 / device.to_host_bytes_per_s),
            (back(span), 1 / device.swap_in_bytes_per_s),
        ]
        if span % 2 == 0:
            at_most([*entries, (span // 2, -1.0)], 0)
        else:
            at_most(entries, step.time[span // 2])
        # x_j can leave from the end of F_{j-1} on.
        produced = sum(size for j, size in amounts.items() if j == 0 or span > 2 * (j - 1) + 1)
        at_most([(out(s), 1.0) for s in range(span + 1)], produced)
    for k, (kind, i) in enumerate(step.operations):
        at_most([(out(s), -1.0) for s in range(2 * k + 1)], -need[k])
        # F_i still needs its own x_i if that has left; what B_i reads is back.
        away = missed[k] if kind == "F" else total
        at_most([(back(s), 1.0) for s in range(2 * k + 2)], away - need[k])
        if kind == "B":
            wanted = sum(size for j, size in amounts.items() if j >= i)
            at_most([(back(s), -1.0) for s in range(2 * k + 1)], -wanted)
    equal = np.zeros((1, size))
    equal[0, count : count + spans] = 1.0
    cost = np.zeros(size)
    cost[:count] = 1.0
    result = linprog(
        cost, np.array(rows), np.array(limits), equal, [total], bounds=bounds, method="highs"
    )
    if result.status == 2:
        return None
    assert result.status == 0, result.message
    return float(result.fun) + sum(step.time)
