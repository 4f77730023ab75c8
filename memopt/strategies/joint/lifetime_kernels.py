"""Compiled: the memory that runs need, when they touch a tensor, and when it may be on the host.

The same rules as `with_frees` and `with_in_place`: a tensor lives from its computation to its last
reader before it is computed again, and an output takes over the storage of a tensor that ends
there.
"""

from __future__ import annotations

import numpy as np

from memopt.solvers.compiled import compiled_unlocked
from memopt.strategies.shared.run_table import Flags, Floats, Ints, VariantArrays


@compiled_unlocked
def last_uses(v: VariantArrays, runs: Ints) -> tuple[Flags, Flags, bool]:
    """Return (for each read of the runs in turn, whether it is the last one of its lifetime; for
    each write, whether it is kept; whether all reads find their tensors)."""
    tensors, points = v.size_bytes.size, runs.size
    needed = v.kept.copy()
    first = np.full(tensors, points)
    reads = writes = 0
    for p in range(points):
        run = runs[p]
        if run < 0:
            continue
        reads += v.reads_at[run + 1] - v.reads_at[run]
        writes += v.writes_at[run + 1] - v.writes_at[run]
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            first[v.writes[k]] = min(first[v.writes[k]], p)
    last = np.zeros(reads, dtype=np.bool_)
    stays = np.zeros(writes, dtype=np.bool_)
    for p in range(points - 1, -1, -1):
        run = runs[p]
        if run < 0:
            for t in v.tangents:
                needed[t] = False
            continue
        begin, end = v.writes_at[run], v.writes_at[run + 1]
        writes -= end - begin
        for k in range(begin, end):
            t = v.writes[k]
            stays[writes + k - begin] = first[t] == p if v.kept[t] else needed[t]
            if not v.kept[t] or first[t] == p:
                needed[t] = False
        begin, end = v.reads_at[run], v.reads_at[run + 1]
        reads -= end - begin
        for k in range(begin, end):
            t = v.reads[k]
            if not needed[t]:
                last[reads + k - begin] = needed[t] = True
    return last, stays, not needed.any()


@compiled_unlocked
def first_absent(v: VariantArrays, runs: Ints) -> int:
    """Return the first tensor that is read before anything computes it; -1: none."""
    made = np.zeros(v.size_bytes.size, dtype=np.bool_)
    made[v.tangents] = True
    for run in runs:
        if run < 0:
            continue
        for k in range(v.reads_at[run], v.reads_at[run + 1]):
            if not made[v.reads[k]]:
                return int(v.reads[k])
        made[v.writes[v.writes_at[run] : v.writes_at[run + 1]]] = True
    return -1


@compiled_unlocked
def used_runs(v: VariantArrays, runs: Ints, must: Flags) -> Ints:
    """Leave out runs whose results nothing reads, but for first runs of operators that must run."""
    points = runs.size
    needed = v.kept.copy()
    seen = np.zeros(must.size, dtype=np.bool_)
    firsts = np.zeros(points, dtype=np.bool_)
    first = np.full(v.size_bytes.size, points)
    for p in range(points):
        if runs[p] >= 0:
            operator = v.operator[runs[p]]
            firsts[p] = not seen[operator]
            seen[operator] = True
            for k in range(v.writes_at[runs[p]], v.writes_at[runs[p] + 1]):
                first[v.writes[k]] = min(first[v.writes[k]], p)
    keep = np.ones(points, dtype=np.bool_)
    for p in range(points - 1, -1, -1):
        run = runs[p]
        if run < 0:
            continue
        used = must[v.operator[run]] and firsts[p]
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            t = v.writes[k]
            used = used or (first[t] == p if v.kept[t] else needed[t])
        keep[p] = used
        if not used:
            continue
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            t = v.writes[k]
            if not v.kept[t] or first[t] == p:
                needed[t] = False
        for k in range(v.reads_at[run], v.reads_at[run + 1]):
            needed[v.reads[k]] = True
    return runs[keep]


@compiled_unlocked
def memory_of(
    v: VariantArrays, runs: Ints, last: Flags, stays: Flags, least_bytes: int
) -> tuple[Ints, Ints]:
    """Return (memory of each time point when nothing moves, the gaps).

    A gap is a row (tensor, after, before, made). The tensor may be on the host between two time
    points that touch it, exclusive at both ends; it was made at `made`. Tensors smaller than
    `least_bytes` have none. Gaps are in the order of `before`.
    """
    points, tensors = runs.size, v.size_bytes.size
    need = np.zeros(points, dtype=np.int64)
    gaps = np.empty((last.size, 4), dtype=np.int64)
    touched = np.full(tensors, -1)
    made = np.full(tensors, -1)
    live, r, w, count = v.resident_bytes, 0, 0, 0
    for p in range(points):
        run = runs[p]
        if run < 0:
            for t in v.tangents:
                live += v.size_bytes[t]
            need[p] = live + v.boundary_bytes
            # A tangent that nothing reads is freed at once, unless the framework holds it.
            for t in v.tangents:
                if not v.kept[t] and not _read_later(v, runs, p, t):
                    live -= v.size_bytes[t]
            continue
        need[p] = live + v.workspace_bytes[run]
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            t = v.writes[k]
            need[p] += v.size_bytes[t]
            if stays[w]:
                live += v.size_bytes[t]
            w += 1
        begin, end = v.reads_at[run], v.reads_at[run + 1]
        taken = False
        for k in range(end - 1, begin - 1, -1):
            t = v.reads[k]
            if last[r + k - begin]:
                live -= v.size_bytes[t]
                if not taken:
                    for n in range(v.over_at[run], v.over_at[run + 1]):
                        if v.over[n] == t and not taken:
                            taken = True
                            need[p] -= v.size_bytes[t]
        for k in range(begin, end):
            t = v.reads[k]
            if not v.stays[t]:
                if touched[t] + 1 < p and v.size_bytes[t] >= least_bytes:
                    gaps[count, 0], gaps[count, 1] = t, touched[t]
                    gaps[count, 2], gaps[count, 3] = p, made[t]
                    count += 1
                touched[t] = p
        r += end - begin
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            if stays[w - v.writes_at[run + 1] + k]:
                touched[v.writes[k]] = made[v.writes[k]] = p
    return need, gaps[:count]


@compiled_unlocked
def _read_later(v: VariantArrays, runs: Ints, after: int, tensor: int) -> bool:
    for p in range(after + 1, runs.size):
        if runs[p] >= 0:
            for k in range(v.reads_at[runs[p]], v.reads_at[runs[p] + 1]):
                if v.reads[k] == tensor:
                    return True
    return False


@compiled_unlocked
def touches_of(v: VariantArrays, runs: Ints) -> tuple[Ints, Ints, Flags, Ints]:
    """Return the time points that read or compute each tensor, once it is computed.

    Returns:
        at, points: tensor t is touched at points[at[t] : at[t + 1]], ascending.
        computed: whether each of them computes the tensor.
        first: the first run that computes each tensor; -1: none.
    """
    tensors = v.size_bytes.size
    first = np.full(tensors, -1)
    at = np.zeros(tensors + 1, dtype=np.int64)
    for run in runs:
        if run < 0:
            continue
        for k in range(v.reads_at[run], v.reads_at[run + 1]):
            if first[v.reads[k]] >= 0:
                at[v.reads[k] + 1] += 1
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            t = v.writes[k]
            at[t + 1] += 1
            if first[t] < 0:
                first[t] = run
    at = np.cumsum(at)
    points = np.empty(at[tensors], dtype=np.int64)
    computed = np.zeros(at[tensors], dtype=np.bool_)
    end = at[:tensors].copy()
    for p in range(runs.size):
        run = runs[p]
        if run < 0:
            continue
        for k in range(v.reads_at[run], v.reads_at[run + 1]):
            t = v.reads[k]
            if end[t] > at[t]:
                points[end[t]] = p
                end[t] += 1
        for k in range(v.writes_at[run], v.writes_at[run + 1]):
            t = v.writes[k]
            points[end[t]], computed[end[t]] = p, True
            end[t] += 1
    return at, points, computed, first


@compiled_unlocked
def gaps_of(
    v: VariantArrays, at: Ints, points: Ints, computed: Flags, least_bytes: int, between: int
) -> Ints:
    """Return a row (tensor, after, before) for each stretch of more than `between` time points in
    which a tensor is not needed, of those that may move and have `least_bytes`; the arrays before
    are those of `touches_of`."""
    found = np.empty((points.size, 3), dtype=np.int64)
    count = 0
    for t in range(v.size_bytes.size):
        if v.stays[t] or v.size_bytes[t] < least_bytes:
            continue
        for k in range(at[t] + 1, at[t + 1]):
            if not computed[k] and points[k] > points[k - 1] + between:
                found[count, 0], found[count, 1], found[count, 2] = t, points[k - 1], points[k]
                count += 1
    return found[:count]


@compiled_unlocked
def durations_of(v: VariantArrays, runs: Ints) -> Floats:
    """Return the seconds of each time point."""
    found = np.zeros(runs.size)
    for p in range(runs.size):
        if runs[p] >= 0:
            found[p] = v.time_s[runs[p]]
    return found
