"""Random modules with compiled kernels: plans have their store-all's bits, and eager's numbers.

The same cases as `tests.fuzz.modules`, over Inductor's fused kernels. Three steps of each program
are those of the compiled store-all, bit for bit, in memory. The store-all's own first step is
compared with eager's, whose dropouts drop what the kernels drop: it may be off by little.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from memopt.kernels.compiled.dropout import SEEDS
from memopt.profiler import Profiled
from tests.fuzz.modules import drawn_cases, drawn_module
from tests.kernels.compiled.same_masks import same_masks
from tests.sweeps.grammar import RandomModule
from tests.sweeps.modules import Found, sweep_module, train

CLOSE, CLOSE_IN_BFLOAT16 = 1e-3, 0.05
"""Of the largest number of a tensor (or a thousandth of the largest of all)."""


def fuzz_compiled(seed: int, limit_s: float = 1.0) -> Found:
    """All cases of a seed's module, its regions compiled."""
    dice, made = drawn_module(seed)
    cases = drawn_cases(dice, made, limit_s)
    return sweep_module(seed, made, cases, kernels="compiled", expect=_store_all)


def _store_all(
    model: nn.Module, profiled: Profiled, made: RandomModule, steps: int, found: Found
) -> dict[str, Any]:
    """The steps of the compiled store-all."""
    with made.context():
        plan = memopt.plan(profiled, strategy="store-all", progress=False)
    eager = copy.deepcopy(model)
    expected = train(model, plan.apply(model), made, steps)
    if any(one.random and one.target != str(SEEDS) for one in plan.graph.operators):
        found.refused["not compared with eager, which draws other numbers"] += 1
        return expected
    try:
        with same_masks(plan.graph):
            own = train(eager, None, made, 1, twice=False)
    except StopIteration:
        found.refused["not compared with eager, which makes dropouts that nothing reads"] += 1
        return expected
    rounded = made.autocast or "bfloat16" in made.source
    off = _off_by(expected, own, CLOSE_IN_BFLOAT16 if rounded else CLOSE)
    if off:
        found.wrong.append(("store-all", f"far from eager: {off}"))
    return expected


def _off_by(found: dict[str, Any], true: dict[str, Any], close: float) -> str:
    """What of a first step is not close; "" if all is."""
    names = [name for name in true if name.startswith("0 ") and not name.endswith("random state")]
    missing = [name for name in names if name not in found]
    if missing:
        return f"{missing[0]} is missing"
    reals = [name for name in names if _is_real(true[name])]
    largest = max((_size(true[name]) for name in reals), default=0.0)
    for name in names:
        a, b = found[name], true[name]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if not (a is b or a == b):
                return f"{name}: {a!r:.60} for {b!r:.60}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"
        elif not _is_real(b):
            if not torch.equal(a, b):
                return f"{name}: other values"
        else:
            error = _size(a.to(torch.complex128) - b.to(torch.complex128))
            share = error / max(_size(b), largest / 1000, 1e-30)
            if not share <= close:
                return f"{name}: by {share:.1e} of {_size(b):.1e}"
    return ""


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _size(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
