"""Compiles a captured step's kernels: `kernels="compiled"` or `"auto"` of `memopt.plan`.

The step is divided into regions, and equal ones are compiled once. Each is checked: its results
must have ATen's layouts and memory of their own. A region that does not compile or fails the
check stays ATen's, and a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.fx import Node

from memopt.kernels.compiled.divide import Region, divide
from memopt.kernels.compiled.fusible import is_fusible
from memopt.kernels.compiled.inductor import REFUSALS, Run, check_compiler, compiled, direct
from memopt.kernels.compiled.losses import with_parts
from memopt.kernels.compiled.pooling import poolings
from memopt.kernels.compiled.rematerialise import rematerialised
from memopt.kernels.compiled.replace import with_kernels
from memopt.kernels.compiled.subgraph import subgraphs
from memopt.kernels.tiled.fuse import without_choice
from memopt.models.garbage import full_collections_deferred
from memopt.models.progress import Progress
from memopt.pricing.flops import Work, elements, operator_name, touched_bytes, work
from memopt.pricing.measure import silent
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.fused import Fused
from memopt.step.kernel import FusedKernel
from memopt.step.memory_layout import storage_of
from memopt.step.region_graph import Subgraph, TensorLayout
from memopt.step.signature import describe_value, signature

Found = list[tuple[Region, Subgraph]]


_RUNS: dict[str, Run | str] = {}
"""Compiled function of each region of this process, or why it cannot be compiled."""


@full_collections_deferred()
def fused(
    model: nn.Module,
    captured: Captured,
    lowering: Lowering,
    device: torch.device,
    *,
    kernels: str,
    aten: Collection[str] = (),
    slower: Callable[[Found], set[str]] = lambda _found: set(),
    block_bytes: int = 1,
    progress: Progress = silent,
) -> Fused:
    """Give a captured step the kernels of its regions.

    Args:
        model: the captured model.
        captured: its step; changed in place.
        lowering: of the step.
        device: where it runs.
        kernels: the choice asked for.
        aten: keys of regions that stay ATen's and need not be compiled.
        slower: returns the keys of compiled regions that stay ATen's all the same.
        block_bytes: the allocator's granularity.
        progress: called with (fraction, what).

    Raises:
        MemoptError: there is no compiler.
    """
    check_compiler(device, kernels)
    anchors: set[Node] = set()
    left: set[str] = set()
    slow = 0
    refused: Counter[str] = Counter()
    while True:
        # Regions depend on each other: one may make a mask that another need not write.
        found = _divided(lowering, anchors)
        _compile([one for _, one in found if one.key not in aten], device, progress)
        good = [p for p in found if p[1].key not in aten and _refusal(p[1], device) is None]
        fused_keys = {one.key for _, one in good} - slower(good)
        stay = [(region, one) for region, one in found if one.key not in fused_keys]
        if not stay:
            break
        for region, one in stay:
            left.add(one.key)
            anchors |= {lowering.nodes[op] for op in region.operators}
            reason = None if one.key in aten else _refusal(one, device)
            if reason is None:
                slow += 1
            else:
                refused[reason] += 1
    if found:
        calls = [(region, one, kernel_of(one, device)) for region, one in found]
        captured = with_kernels(captured, lowering, calls)
        lowering = build(model, captured, block_bytes)
    notes = _notes(found, slow, refused)
    return Fused(captured, lowering, notes, kernels, tuple(sorted(left)))


def planned_regions(
    model: nn.Module, captured: Captured, lowering: Lowering, kernels: str, block_bytes: int
) -> tuple[Fused, dict[str, tuple[Work, ...]]]:
    """Turn a step's regions into operators, none of them compiled, and return the work of each by
    its key: for an estimate."""
    plain = without_choice(kernels, model, captured, lowering, block_bytes)
    if plain is not None:
        return plain
    lowering = with_parts(model, captured, lowering, block_bytes)
    found = _divided(lowering, set())
    if not found:
        return Fused(captured, lowering, (), kernels), {}
    works = {one.key: region_work(lowering, region, one) for region, one in found}
    calls = [(region, one, FusedKernel(one.key, graph=one.graph)) for region, one in found]
    captured = with_kernels(captured, lowering, calls)
    note = (
        f"{len(found)} regions are priced as fused kernels: each reads its inputs and writes its "
        "outputs once, in one launch, without memory of its own."
    )
    return Fused(captured, build(model, captured, block_bytes), (note,), kernels), works


def _refusal(one: Subgraph, device: torch.device) -> str | None:
    """Return why a region cannot run as a compiled kernel; None: it can."""
    run = _RUNS[_place(one, device)]
    return run if isinstance(run, str) else None


def kernel_of(one: Subgraph, device: torch.device) -> FusedKernel:
    """Return the kernel of a region that was compiled."""
    run = _RUNS[_place(one, device)]
    assert not isinstance(run, str)
    return FusedKernel(one.key, run, one.graph)


def _place(one: Subgraph, device: torch.device) -> str:
    # The device's number is in the compiled code, which launches on its streams.
    return f"{device}|{one.key}"


def _divided(lowering: Lowering, anchors: set[Node]) -> Found:
    """Divide a step into regions without `anchors`; those that write nothing are left out."""
    nodes = lowering.nodes
    pools = poolings(nodes, anchors)
    free = [node in pools or (node not in anchors and is_fusible(node)) for node in nodes]
    regions = divide(lowering, free.__getitem__)
    members = [op for op, may in enumerate(free) if may]
    again = rematerialised(lowering, regions, members)
    return subgraphs(lowering, regions, again)


def _compile(found: list[Subgraph], device: torch.device, progress: Progress) -> None:
    """Compile and check the regions that this process has not compiled yet."""
    missing = {one.key: one for one in found if _place(one, device) not in _RUNS}
    made = compiled(missing, progress)
    for key, run in made.items():
        one = missing[key]
        if not isinstance(run, str):
            run = _wrong(one, run, device) or direct(run)
        _RUNS[_place(one, device)] = run


def _wrong(one: Subgraph, run: Run, device: torch.device) -> str | None:
    """Run a compiled region on stand-in data; return what is wrong with its results, or None."""
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
        found = TensorLayout(
            tuple(result.shape), tuple(result.stride()), result.dtype, layout.device
        )
        if str(found) != str(
            TensorLayout(layout.shape, layout.strides, layout.dtype, layout.device)
        ):
            return f"a result is laid out as {found}, not as {layout}"
    storages = [storage_of(result) for result in results]
    if len({*storages, *given}) < len(storages) + len(given):
        return "its results share memory"
    return None


def _stand_in(layout: TensorLayout, device: torch.device) -> torch.Tensor:
    spans = zip(layout.shape, layout.strides, strict=True)
    count = layout.offset + 1 + sum((size - 1) * stride for size, stride in spans)
    flat = torch.zeros(count, dtype=layout.dtype, device=device)
    return flat.as_strided(layout.shape, layout.strides, layout.offset)


def _notes(taken: Found, slow: int, refused: Counter[str]) -> tuple[str, ...]:
    distinct = len({one.key for _, one in taken})
    notes = [
        f"{len(taken)} regions run as compiled kernels, {distinct} of them distinct: they round, "
        "and draw random numbers, in their own way. Every plan of these kernels gives the same "
        "bits as their store-all, if it chooses no implementation that rounds otherwise."
    ]
    if slow:
        notes.append(f"{slow} regions stay ATen's, whose kernels were faster for them.")
    notes += [
        f"{count} regions stay ATen's, since they could not be compiled: {reason}"
        for reason, count in refused.most_common()
    ]
    return tuple(notes)


_LOOKUPS = ("embedding", "gather")
"""Operators that read the first operand only where the second points."""


def region_work(lowering: Lowering, region: Region, one: Subgraph) -> tuple[Work, ...]:
    """Return the work of a fused kernel: one launch, which reads each input and writes each output
    once, and the operations of each operator, in registers."""
    parts = []
    for op in region.operators:
        node = lowering.nodes[op]
        parts.append(work(signature(node), describe_value(node)))
    dtype = next((part.dtype for part in parts if part.dtype), "")
    moved = sum(_read_of(node) for node in one.graph.find_nodes(op="placeholder")) + sum(
        touched_bytes(describe_value(value)) for value in one.values
    )
    whole = Work("", dtype, 0.0, moved)
    return (whole, *(Work(p.kind, p.dtype, p.operations, 0, calls=0) for p in parts))


def _read_of(node: Node) -> int:
    """Return the bytes that a kernel reads of an input; of a table, only the rows looked up."""
    given = describe_value(node.meta["val"])
    whole = touched_bytes(given)
    looked_up = 0
    for user in node.users:
        table = operator_name(user.target) in _LOOKUPS and user.args[0] is node
        if not table:
            return whole
        looked_up += elements(describe_value(user.meta["val"])) * given.dtype.itemsize
    return int(min(whole, looked_up))
