"""Other forms of compiled regions (`memopt/profiler/compiled/forms.py`) as alternatives.

They are attached as they are found. Before a strategy sees them they are compiled and run; those
that fail or give other bits are left out (`usable`), and so are those that gain nothing
(`region_choice.worthwhile`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.region_choice import forms_of, is_product, without
from memopt.implementations.site import Sites
from memopt.models.graph import Graph
from memopt.profiler.build import Lowering
from memopt.profiler.cache import Cost
from memopt.profiler.compiled.form import Form, Operand
from memopt.profiler.compiled.fuse import compile_parts, kernel_of, refusal
from memopt.profiler.compiled.same_bits import Key, SameBits
from memopt.profiler.measure import MeasureOptions, Progress, costs_of, environment, silent
from memopt.profiler.signature import Signature, call_signature, signature
from memopt.torch_private import pytree

_COPIED_BYTES = 2**26


def attach(sites: Sites) -> None:
    """Every form of every region, and of the products that read what one writes again."""
    extras: dict[Node, Node] = {}

    def base(node: Node) -> Node:
        return node if sites.is_known(node) else extras[node]

    def given(one: Any) -> Any:
        return sites.look(base(one.base), one.views) if isinstance(one, Operand) else one

    for form in sites.forms:
        _add_extras(sites, form, extras)
        args = pytree.tree_map(given, list(form.args))
        results = None if form.results is None else tuple(map(base, form.results))
        sites.add(form.call, form.name, form.target, args, results, work=form.work)


def _add_extras(sites: Sites, form: Form, extras: dict[Node, Node]) -> None:
    """The tensors that only forms write."""
    if form.part is None or form.results is None:
        return
    for node, value in zip(form.results, form.part.values, strict=True):
        if not sites.is_known(node) and node not in extras:
            extras[node] = sites.extra(f"{node.name}__kept", value)


def compiled(
    lowering: Lowering,
    device: torch.device,
    chosen: Collection[Key] | None = None,
    progress: Progress = silent,
) -> dict[Key, str]:
    """Compile forms, and say why those that could not be were not.

    Args:
        lowering: with the forms as alternatives.
        device: where they run.
        chosen: which alternatives are needed; None: all.
        progress: called with (fraction, what).
    """
    wanted = {
        key: form.part
        for key, form in forms_of(lowering).items()
        if form.part is not None and (chosen is None or key in chosen)
    }
    compile_parts(list(wanted.values()), device, progress)
    refused = {}
    for key, part in wanted.items():
        reason = refusal(part, device)
        if reason is None:
            lowering.alternatives[key].target.run = kernel_of(part, device).run  # type: ignore[union-attr]
        else:
            refused[key] = reason
    return refused


def usable(lowering: Lowering, device: torch.device, progress: Progress = silent) -> Lowering:
    """A lowering whose forms are compiled, without those that could not be, or that give other
    bits than what they stand in for."""
    if not forms_of(lowering):
        return lowering
    lowering = without(lowering, set(compiled(lowering, device, progress=progress)))
    forms = forms_of(lowering)
    regions = [key for key, form in forms.items() if form.part is not None]
    same = SameBits(lowering, regions, dict(_twins(lowering, forms)), device)
    return without(lowering, {key for key in regions if not same.of(*key)})


def _twins(lowering: Lowering, forms: Iterable[Key]) -> Iterator[tuple[int, int]]:
    """(tensor that a region writes again, the forward's) of products that have a form."""
    for op, name in forms:
        own, form = lowering.nodes[op], lowering.alternatives[op, name]
        if is_product(lowering, (op, name)):
            for one, other in zip(own.args, form.args, strict=True):
                if isinstance(one, Node) and isinstance(other, Node) and one is not other:
                    (again,), (kept,) = lowering.storages[one], lowering.storages[other]
                    if again is not None and kept is not None:
                        yield again, kept


def figures(
    graph: Graph, lowering: Lowering, device: torch.device, options: MeasureOptions
) -> dict[Key, dict[str, Any]]:
    """Times and workspaces of forms.

    A form and the kernel in whose place it stands are measured together, in turns: what counts is
    which is faster, and the kernel may have been measured another day. A product takes the time
    that it takes in any case.

    Args:
        graph: priced, without alternatives.
        lowering: with them.
        device: where they run.
        options: how hard to measure, and where figures are kept.
    """
    pairs: dict[tuple[str, str], tuple[Signature, Signature]] = {}
    kinds: dict[Key, tuple[str, str]] = {}
    found: dict[Key, dict[str, Any]] = {}
    for key in forms_of(lowering):
        own, form = lowering.nodes[key[0]], lowering.alternatives[key]
        operator = graph.operators[key[0]]
        if is_product(lowering, key):
            found[key] = {
                "time_s": operator.time_s,
                "workspace_bytes": operator.workspace_bytes,
            }
        else:
            kinds[key] = str(own.target), str(form.target)
            if kinds[key] not in pairs:
                pairs[kinds[key]] = signature(own), signature(form)
    known = dict(zip(pairs, _beside(list(pairs.values()), device, options), strict=True))
    for key, kind in kinds.items():
        cost = known[kind]
        time_s = cost.time_s * graph.operators[key[0]].time_s
        found[key] = {"time_s": time_s, "workspace_bytes": cost.workspace_bytes}
    return found


def byte_s(device: torch.device, options: MeasureOptions) -> float:
    """Seconds that keeping a byte takes, beside what kernels are measured to take: it is written to
    memory of its own, which the allocator may have to ask the system for, and read back when no
    cache holds it any more. A copy of much does that.
    """
    key = f"{environment(device)}|copying {_COPIED_BYTES} bytes"
    known = {} if options.cache is None or options.renew else options.cache.load([key])
    if key not in known:
        many = torch.empty(_COPIED_BYTES // 4, device=device)
        (cost,) = costs_of(
            [call_signature(torch.ops.aten.clone.default, (many,), {})],
            device,
            replace(options, cache=None),
        )
        known = {key: cost}
        if options.cache is not None:
            options.cache.store(known)
    return known[key].time_s / _COPIED_BYTES


def _beside(
    pairs: Sequence[tuple[Signature, Signature]], device: torch.device, options: MeasureOptions
) -> list[Cost]:
    """Of pairs of calls the cost of the second, its time as a share of the first's."""
    texts = (f"{own.text}\n{form.text}" for own, form in pairs)
    digests = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    keys = [f"{environment(device)}|form {digest}" for digest in digests]
    known = {} if options.cache is None or options.renew else options.cache.load(keys)
    missing = [pair for key, pair in zip(keys, pairs, strict=True) if key not in known]
    if missing:
        calls = [call for pair in missing for call in pair]
        costs = costs_of(calls, device, replace(options, cache=None))
        fresh = {
            key: replace(form, time_s=form.time_s / max(own.time_s, 1e-9), output_bytes=())
            for key, own, form in zip(
                (key for key in keys if key not in known), costs[::2], costs[1::2], strict=True
            )
        }
        if options.cache is not None:
            options.cache.store(fresh)
        known |= fresh
    return [known[key] for key in keys]
