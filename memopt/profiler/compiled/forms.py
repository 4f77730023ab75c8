"""Forms of regions that read what the forward kept, where the region's own makes it again.

What regions make again is least in bytes (`rematerialise.py`). A plan with memory to spare may
rather keep a value and save the arithmetic, or the second write. So a region of the backward has up
to two more forms, those of two other divisions of the whole step: one in which nothing is written
again for products, and one in which nothing is made again at all. They go with forms of others:
the region of the forward that writes one more value, and the product that reads the forward's
tensor instead of the one that is written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from memopt.models.graph import Phase
from memopt.profiler.build import Lowering, held_by
from memopt.profiler.collectives import is_wait
from memopt.profiler.compiled.divide import Region
from memopt.profiler.compiled.form import HERE, Form, Operand, ViewCall
from memopt.profiler.compiled.kernel import FusedKernel
from memopt.profiler.compiled.region_graph import Subgraph
from memopt.profiler.compiled.rematerialise import Rematerialised
from memopt.profiler.compiled.replace import Replaced
from memopt.profiler.compiled.subgraph import subgraphs
from memopt.profiler.flops import Work
from memopt.torch_private import pytree

OPERANDS, ALL = "operands kept", "all kept"
"""Names: nothing is written again for products; nothing is made again."""
MOST = 12
"""Distinct forms of the backward's regions at most: those with most bytes at stake."""
LEAST = 0.01
"""Bytes at stake of such a form at least, as a share of the most."""

Others = Sequence[tuple[str, Rematerialised]]


@dataclass(frozen=True)
class Wanted:
    """A form of a region, before regions are replaced by calls.

    Attributes:
        region, name: whose form it is.
        part: what it computes.
        operands: the part's inputs, without its dropouts' seeds.
        work: for an estimate.
    """

    region: Region
    name: str
    part: Subgraph
    operands: tuple[Operand, ...]
    work: tuple[Work, ...] = ()


def forms_wanted(
    lowering: Lowering,
    regions: Sequence[Region],
    found: Sequence[tuple[Region, Subgraph]],
    base: Rematerialised,
    others: Others,
    work_of: Callable[[Region, Subgraph], tuple[Work, ...]] = lambda _region, _part: (),
) -> list[Wanted]:
    """The forms that are worth a kernel, those of the forward first.

    Args:
        lowering: of the step before its regions are replaced.
        regions: of both halves.
        found: those that are to be replaced, as graphs of their own.
        base: what these make again.
        others: names, and what regions make again in forms of that name.
        work_of: for an estimate.
    """
    step = _Step(lowering, regions, dict(found), base)
    backward = [one for name, other in others for one in step.of_backward(name, other)]
    backward = step.with_most_at_stake(backward)
    wanted = [*step.of_forward(backward), *backward]
    return [replace(one, work=work_of(one.region, one.part)) for one in wanted]


class _Step:
    """A step whose regions have forms."""

    def __init__(
        self,
        lowering: Lowering,
        regions: Sequence[Region],
        own: Mapping[Region, Subgraph],
        base: Rematerialised,
    ) -> None:
        self.lowering, self.regions, self.own, self.base = lowering, regions, own, base
        self.graph = lowering.graph
        self.inside = {op: region for region in regions for op in region.operators}
        self.written = {
            t
            for part in own.values()
            for t in self.held([one for one in part.outputs if one not in part.again])
        }
        self.seen: dict[Region, list[tuple[str, tuple[Node, ...]]]] = {
            region: [(part.key, part.inputs)] for region, part in own.items()
        }

    def held(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        return held_by(nodes, self.lowering.storages)

    def is_backward(self, region: Region) -> bool:
        return self.graph.operators[region.operators[0]].phase is Phase.BACKWARD

    def of_backward(self, name: str, other: Rematerialised) -> list[Wanted]:
        """The backward's forms of a name."""
        makes = self.base.tensors - other.tensors
        changed = [r for r in self.own if self.is_backward(r) and self._reads_or_writes(r, makes)]
        parts = dict(subgraphs(self.lowering, self.regions, other, only=changed))
        new: list[Wanted] = []
        for region, part in parts.items():
            if (part.key, part.inputs) in self.seen[region] or self._missing(part) is None:
                continue
            operands = operands_of(self.lowering, part)
            if operands is not None and set(part.outputs) <= set(self.own[region].outputs):
                self.seen[region].append((part.key, part.inputs))
                new.append(Wanted(region, name, part, operands))
        return new

    def _reads_or_writes(self, region: Region, made: frozenset[int]) -> bool:
        """Whether a region makes one of these tensors again, or writes one for a product."""
        ops = (self.graph.operators[op] for op in region.operators)
        reads = {t for one in ops for t in one.reads}
        return bool(reads & made) or region in self.base.written.values()

    def _missing(self, part: Subgraph) -> frozenset[int] | None:
        """What a form reads of the forward that no region writes; None: none could."""
        found = set()
        for tensor in self.held(part.inputs):
            region = self.inside.get(self.graph.producer.get(tensor, -1))
            if region is not None and tensor not in self.written:
                if region not in self.own or self.is_backward(region):
                    return None
                found.add(tensor)
        return frozenset(found)

    def of_forward(self, backward: Sequence[Wanted]) -> list[Wanted]:
        """The forms of the forward's regions that write what those of the backward read, named
        like them."""
        extra: dict[str, set[int]] = defaultdict(set)
        for one in backward:
            extra[one.name].update(self._missing(one.part) or ())
        found = []
        for name, tensors in extra.items():
            writers = {self.inside[self.graph.producer[t]] for t in tensors}
            also = replace(self.base, kept=self.base.kept | tensors)
            for region, part in subgraphs(self.lowering, self.regions, also, only=writers):
                operands = operands_of(self.lowering, part)
                if operands is not None:
                    found.append(Wanted(region, name, part, operands))
        return found

    def at_stake_bytes(self, one: Wanted) -> int:
        """The bytes that a form reads or writes otherwise than its region does."""
        own = self.own[one.region]
        tensors = set(self.held(one.part.inputs)) ^ set(self.held(own.inputs))
        again = self.held(sorted(own.again - set(one.part.outputs), key=str))
        return sum(self.graph.tensors[t].size_bytes for t in tensors.union(again))

    def with_most_at_stake(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """The MOST forms of the backward with most bytes at stake."""
        at_stake: dict[str, int] = defaultdict(int)
        for one in wanted:
            at_stake[one.part.key] += self.at_stake_bytes(one)
        least = LEAST * max(at_stake.values(), default=0)
        most = sorted(at_stake, key=lambda key: (-at_stake[key], key))[:MOST]
        return [w for w in wanted if w.part.key in most and at_stake[w.part.key] >= least]


def operands_of(lowering: Lowering, part: Subgraph) -> tuple[Operand, ...] | None:
    """What a part reads, as bases and views; None: not all of it can be said so."""
    found = [operand_of(lowering, node) for node in part.inputs]
    known = tuple(one for one in found if one is not None)
    return known if len(known) == len(found) else None


def operand_of(lowering: Lowering, node: Node) -> Operand | None:
    """A node as a base and views of it; None: it is a view of several things, or waits."""
    views: list[ViewCall] = []
    while True:
        held = lowering.storages.get(node, ())
        if len(held) == 1 and held[0] is not None:
            given = node.op in ("placeholder", "get_attr")
            if given or lowering.bases.get(held[0]) is node:
                return Operand(node, tuple(reversed(views)))
        sources = node.all_input_nodes
        if node not in lowering.views or len(sources) != 1 or is_wait(node.target):
            return None
        args, kwargs = pytree.tree_map(_here, (tuple(node.args), dict(node.kwargs)))
        views.append(ViewCall(node.target, args, kwargs, node.meta["val"]))
        (node,) = sources


def _here(argument: Any) -> Any:
    return HERE if isinstance(argument, Node) else argument


def forms_of(wanted: Sequence[Wanted], replaced: Replaced, lowering: Lowering) -> tuple[Form, ...]:
    """Forms of the calls that regions became.

    Args:
        wanted: the regions' forms.
        replaced: what became of them.
        lowering: of the step with kernels.
    """
    products = _of_products(replaced, lowering)
    found: list[Form] = []
    # What ATen's kernels computed for regions alone, which make it again now, is gone.
    there = set(lowering.storages)
    for one in wanted:
        call = replaced.calls[one.region]
        unwritten = set(replaced.written_by[one.region]) - set(one.part.outputs)
        if not unwritten <= products.keys():
            continue
        operands = [_now(operand, replaced) for operand in one.operands]
        if not there.issuperset(operand.base for operand in operands):
            continue
        given = one.part.graph.find_nodes(op="placeholder")[len(operands) :]
        seeds = zip(one.part.dropouts, given, strict=True)
        operands += [_seed(replaced, dropout, node.meta["val"]) for dropout, node in seeds]
        results = tuple(replaced.result(one.region, node) for node in one.part.outputs)
        there.update(results)
        kernel = FusedKernel(one.part.key, graph=one.part.graph)
        found.append(Form(call, one.name, kernel, operands, results, one.part, one.work))
    kinds = {reader: form for forms in products.values() for reader, form in forms.items()}
    return (*found, *kinds.values())


def _now(operand: Operand, replaced: Replaced) -> Operand:
    return replace(operand, base=replaced.renamed.get(operand.base, operand.base))


def _seed(replaced: Replaced, dropout: Node, value: torch.Tensor) -> Operand:
    """A dropout's seed. Its value does not say where among the others it is: equal regions are
    measured once."""
    seeds, place = replaced.seeds[dropout]
    return Operand(seeds, (ViewCall(torch.ops.aten.select.int, (HERE, 0, place), {}, value),))


def _of_products(replaced: Replaced, lowering: Lowering) -> dict[Node, dict[Node, Form]]:
    """For each node that a region writes again the forms of its readers that read what the forward
    wrote; a node is left out where a reader has none."""
    written = {
        lowering.storages[result][0]: node
        for node, result in replaced.written.items()
        if result in lowering.storages
    }
    forms: dict[Node, Form | None] = {}
    found: dict[Node, dict[Node, Form]] = {}
    for tensor, node in written.items():
        assert tensor is not None
        readers = [lowering.nodes[op] for op in lowering.graph.readers[tensor]]
        for reader in readers:
            if reader not in forms:
                forms[reader] = _of_product(reader, written, replaced, lowering)
        known = {reader: form for reader in readers if (form := forms[reader]) is not None}
        if len(known) == len(readers):
            found[node] = known
    return found


def _of_product(
    reader: Node, written: Mapping[int | None, Node], replaced: Replaced, lowering: Lowering
) -> Form | None:
    """The form of a product that reads the forward's tensors; None: it has none."""
    if isinstance(reader.target, FusedKernel) or reader.kwargs:
        return None
    args: list[Any] = []
    for argument in reader.args:
        if isinstance(argument, (list, tuple)) and any(isinstance(x, Node) for x in argument):
            return None
        held = lowering.storages[argument][0] if isinstance(argument, Node) else None
        node = written.get(held)
        if node is None or not isinstance(argument, Node):
            args.append(argument)
            continue
        operand = operand_of(lowering, argument)
        base = replaced.renamed.get(node, node)
        if operand is None or base not in lowering.storages:
            return None
        args.append(replace(operand, base=base))
    return Form(reader, OPERANDS, reader.target, args)
