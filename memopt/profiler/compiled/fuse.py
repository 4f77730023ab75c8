"""Kernels for a captured step: `kernels="compiled"` or `"auto"` of `memopt.plan`.

The step is divided into regions, equal ones are compiled once, and each is checked: results laid
out as ATen's and in memory of their own. What does not compile, or is not what it should be, stays
ATen's, and a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from memopt.profiler.build import Lowering, build
from memopt.profiler.capture import Captured
from memopt.profiler.compiled.divide import Region, divide
from memopt.profiler.compiled.fusible import is_fusible
from memopt.profiler.compiled.inductor import REFUSALS, Run, check_compiler, compiled
from memopt.profiler.compiled.kernel import PREFIX, FusedKernel
from memopt.profiler.compiled.replace import with_kernels
from memopt.profiler.compiled.subgraph import Layout, Subgraph, subgraphs
from memopt.profiler.memory_layout import storage_of

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Fused:
    """A captured step with compiled kernels.

    Attributes:
        captured: the step.
        lowering: of it, unpriced.
        notes: what a user should know.
    """

    captured: Captured
    lowering: Lowering
    notes: tuple[str, ...] = ()


_RUNS: dict[str, Run | str] = {}
"""What runs each region that this process has compiled, or why it cannot be compiled."""


def fused(
    model: nn.Module,
    captured: Captured,
    lowering: Lowering,
    device: torch.device,
    *,
    kernels: str = "compiled",
    only: frozenset[str] | None = None,
    keep: Callable[[list[tuple[Region, Subgraph]]], list[bool]] | None = None,
    block_bytes: int = 1,
    progress: Progress = lambda _fraction, _what: None,
) -> Fused:
    """A captured step with the kernels of its regions.

    Args:
        model: what was captured.
        captured: its step; changed in place.
        lowering: of the step.
        device: where it runs.
        kernels: for messages.
        only: keys of the regions that may be used; None: all.
        keep: of regions that compiled, which are to be used; None: all.
        block_bytes: the allocator's granularity.
        progress: called with (fraction, what).

    Raises:
        MemoptError: there is no compiler.
    """
    check_compiler(device, kernels)
    anchors: set[Node] = set()
    while True:
        found = _regions(lowering, anchors)
        wanted = [one for _, one in found if only is None or one.key in only]
        _compile(wanted, device, progress)
        good = [pair for pair in found if pair[1] in wanted and _compiles(pair[1], device)]
        chosen = [True] * len(good) if keep is None else keep(good)
        taken = [pair for pair, kept in zip(good, chosen, strict=True) if kept]
        # The mask of a dropout is made wherever it is read, or nowhere.
        left = {node for pair in found if pair not in taken for node in pair[1].dropouts}
        if left <= anchors:
            break
        anchors |= left
    refused = Counter(
        reason for one in wanted if isinstance(reason := _RUNS[_place(one, device)], str)
    )
    if taken:
        calls = [(region, one, kernel_of(one, device)) for region, one in taken]
        captured = with_kernels(captured, lowering, calls)
        lowering = build(model, captured, block_bytes)
    return Fused(captured, lowering, _notes(found, taken, len(good), refused))


def _compiles(one: Subgraph, device: torch.device) -> bool:
    return not isinstance(_RUNS[_place(one, device)], str)


def kernel_of(one: Subgraph, device: torch.device) -> FusedKernel:
    """The kernel of a region that was compiled."""
    run = _RUNS[_place(one, device)]
    assert not isinstance(run, str)
    return FusedKernel(one.key, run)


def keys_of(targets: Iterable[str]) -> frozenset[str]:
    """The keys of the compiled regions among operators' targets."""
    return frozenset(t.removeprefix(PREFIX) for t in targets if t.startswith(PREFIX))


def _place(one: Subgraph, device: torch.device) -> str:
    return f"{device.type}|{one.key}"


def _regions(lowering: Lowering, anchors: set[Node]) -> list[tuple[Region, Subgraph]]:
    """The regions of a step in which some dropouts stay as they are."""
    nodes = lowering.nodes
    free = [node not in anchors and is_fusible(node) for node in nodes]
    return subgraphs(lowering, divide(lowering, free.__getitem__))


def _compile(found: list[Subgraph], device: torch.device, progress: Progress) -> None:
    """Compile what this process has not compiled yet, and check it."""
    missing = {one.key: one for one in found if _place(one, device) not in _RUNS}
    made = compiled(missing, progress)
    for key, run in made.items():
        one = missing[key]
        wrong = run if isinstance(run, str) else _wrong(one, run, device)
        _RUNS[_place(one, device)] = run if wrong is None else wrong


def _wrong(one: Subgraph, run: Run, device: torch.device) -> str | None:
    """What is wrong with the results of a compiled region, on stand-in data; None: nothing."""
    inputs = [_stand_in(layout, device) for layout in one.layouts]
    given = {storage_of(value) for value in inputs}
    try:
        with torch.no_grad():
            results = list(run(list(inputs)))
    except REFUSALS as error:
        return f"it fails: {error}"
    for result, layout in zip(results, one.results, strict=True):
        if not isinstance(result, torch.Tensor):
            return "a result is no tensor"
        found = Layout(tuple(result.shape), tuple(result.stride()), result.dtype, layout.device)
        if str(found) != str(Layout(layout.shape, layout.strides, layout.dtype, layout.device)):
            return f"a result is laid out as {found}, not as {layout}"
    storages = [storage_of(result) for result in results]
    if len({*storages, *given}) < len(storages) + len(given):
        return "its results share memory"
    return None


def _stand_in(layout: Layout, device: torch.device) -> torch.Tensor:
    spans = zip(layout.shape, layout.strides, strict=True)
    count = layout.offset + 1 + sum((size - 1) * stride for size, stride in spans)
    flat = torch.zeros(count, dtype=layout.dtype, device=device)
    return flat.as_strided(layout.shape, layout.strides, layout.offset)


def _notes(
    found: list[Any], taken: list[Any], compiled_count: int, refused: Counter[str]
) -> tuple[str, ...]:
    distinct = len({one.key for _, one in taken})
    notes = [
        f"{len(taken)} of {len(found)} regions run as compiled kernels ({distinct} distinct), which "
        "round, and draw random numbers, in their own way; every plan of the same kernels gives "
        "the same bits."
    ]
    if compiled_count > len(taken):
        slower = compiled_count - len(taken)
        notes.append(f"{slower} regions stay ATen's, whose kernels are faster for them.")
    for reason, count in refused.most_common():
        notes.append(f"{count} regions stay ATen's, they could not be compiled: {reason}")
    return tuple(notes)


