"""Exhaustive search of Problem 1 over event times: shares nothing with the package's solvers."""

from __future__ import annotations

import heapq
import itertools

from memopt.models.chain import Chain
from memopt.models.device import Device
from tests.strategies.offload.oracle import Step

ON, LEAVING, LEFT, AWAY, RETURNING, BACK = range(6)


def least_makespan(
    chain: Chain, budget: int, device: Device, movable: list[int], limit_s: float = float("inf")
) -> float | None:
    """The least makespan with whole transfers at any time, or None.

    Dijkstra over (next operation, time left of the running one, where each x is, time left of
    the link's transfers). In a left-shifted schedule everything starts when something ends, so
    decisions are taken at those times only. A copy that has been made while its F_j still reads
    x_j (LEFT) is released when that ends (AWAY).
    """
    step = Step(chain)
    capacity = budget - chain.resident_bytes
    count = len(step.operations)
    y = [chain.gradient_bytes(i) for i in range(step.n + 1)]
    g = [s.parameter_gradient_bytes for s in chain.stages]
    out_s = {j: device.swap_out_time_s(step.x[j]) for j in movable}
    back_s = {j: device.swap_in_time_s(step.x[j]) for j in movable}

    def absent(where: tuple[int, ...], made: int) -> int:
        pairs = zip(movable, where, strict=True)
        return sum(step.x[j] for j, w in pairs if w == AWAY and j < made)

    def fits(done: int, running: bool, where: tuple[int, ...]) -> bool:
        if running:
            made = step.operations[done][1] + 2
            used = step.used[done]
        elif done == 0:
            made, used = 1, step.x[0]
        else:
            kind, i = step.operations[done - 1]
            made = i + 2 if kind == "F" else i + 1
            used = sum(step.x[:made]) + (0 if kind == "F" else y[i] + sum(g[i:]))
        return used - absent(where, made) <= capacity

    def settle(done: int, running: bool, where: tuple[int, ...]) -> tuple[int, ...]:
        """Copies that no operation reads any more leave the device."""
        read = step.operations[done][1] if running else -2
        return tuple(
            AWAY if w == LEFT and done > j and j not in (read, read + 1) else w
            for j, w in zip(movable, where, strict=True)
        )

    start = (0, None, tuple(ON for _ in movable), ())
    best = {start: 0.0}
    order = itertools.count()
    queue = [(0.0, next(order), start)]
    while queue:
        now, _, state = heapq.heappop(queue)
        if now > best[state] or now > limit_s:
            continue
        done, left, where, links = state
        if done == count:
            return now
        following = []
        if left is None:
            kind, i = step.operations[done]
            reads = (i, i + 1) if kind == "B" else (i,)
            ready = all(
                w in (ON, LEAVING, LEFT, BACK)
                for j, w in zip(movable, where, strict=True)
                if j in reads
            )
            if ready and fits(done, True, where):
                following.append((now, (done, step.time[done], where, links)))
        busy = {way for way, _, _ in links}
        for position, j in enumerate(movable):
            made = done >= j  # F_{j-1} is over
            dead = done > count - 1 - j  # B_j has run: nothing is gained any more
            free_link = not links if not device.duplex else None
            if where[position] == ON and made and not dead and step.x[j]:
                if free_link or (free_link is None and "out" not in busy):
                    moved = (*where[:position], LEAVING, *where[position + 1 :])
                    following.append((now, (done, left, moved, _with(links, "out", out_s[j], j))))
            elif where[position] == AWAY and (
                free_link or (free_link is None and "in" not in busy)
            ):
                moved = (*where[:position], RETURNING, *where[position + 1 :])
                if fits(done, left is not None, moved):
                    following.append((now, (done, left, moved, _with(links, "in", back_s[j], j))))
        times = [t for _, t, _ in links] + ([] if left is None else [left])
        if times:
            passed = min(times)
            new_done, new_left, new_where = done, left, where
            if left is not None:
                new_left = left - passed
                if new_left <= 1e-12:
                    new_done, new_left = done + 1, None
            new_links = []
            for way, t, j in links:
                if t - passed > 1e-12:
                    new_links.append((way, t - passed, j))
                    continue
                position = movable.index(j)
                after = LEFT if way == "out" else BACK
                new_where = (*new_where[:position], after, *new_where[position + 1 :])
            new_where = settle(new_done, new_left is not None, new_where)
            following.append((now + passed, (new_done, new_left, new_where, tuple(new_links))))
        for time_s, new in following:
            key = _rounded(new)
            if time_s < best.get(key, float("inf")) - 1e-12:
                best[key] = time_s
                heapq.heappush(queue, (time_s, next(order), key))
    return None


def _with(links, way: str, time_s: float, j: int):
    return tuple(sorted((*links, (way, time_s, j))))


def _rounded(state):
    done, left, where, links = state
    left = None if left is None else round(left, 9)
    return done, left, where, tuple((way, round(t, 9), j) for way, t, j in links)
