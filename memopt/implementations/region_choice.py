"""Which forms of compiled regions a strategy is offered: those that fit together, and gain."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memopt.models.graph import Graph, Operator, Phase
from memopt.models.variants import Variant, variant
from memopt.profiler.build import Lowering
from memopt.profiler.compiled.form import Form
from memopt.profiler.compiled.same_bits import Key

GAIN = 0.02
"""Share of an operator's time that a form must save, at least, to be offered."""


def forms_of(lowering: Lowering) -> dict[Key, Form]:
    """The forms that are among the alternatives."""
    places = {node: op for op, node in enumerate(lowering.nodes)}
    keys = ((places.get(form.call, -1), form.name) for form in lowering.forms)
    pairs = zip(keys, lowering.forms, strict=True)
    operators = lowering.graph.operators
    known = {
        (op, choice.name) for op, one in enumerate(operators) for choice in one.implementations
    }
    return {key: form for key, form in pairs if key in known}


def worthwhile(graph: Graph, lowering: Lowering, byte_s: float = 0.0) -> tuple[Graph, Lowering]:
    """A priced graph, and its lowering, without the forms that gain nothing: those of the backward
    that save less than GAIN of their operator's time, writing more in the forward included, and
    those that keep no less than a faster one; and what only these needed.

    Args:
        graph: priced.
        lowering: its lowering.
        byte_s: seconds that a byte kept more takes, beside what was measured.
    """
    priced = replace(lowering, graph=graph)
    forms = forms_of(priced)
    if not forms:
        return graph, lowering
    out = _gaining_nothing(priced, needed(priced, set(forms)), byte_s)
    out |= set(forms) - needed(priced, set(forms) - out)
    return without(priced, out).graph, without(lowering, out)


def without(lowering: Lowering, out: Collection[Key]) -> Lowering:
    """The lowering without some of its alternatives, and those forms that need them."""
    if not out:
        return lowering
    keys = set(forms_of(lowering))
    return lowering.without({*out, *(keys - needed(lowering, keys - set(out)))})


class Needs:
    """What forms need of each other."""

    def __init__(self, lowering: Lowering, keys: Collection[Key]) -> None:
        self.graph = graph = lowering.graph
        self.keys = keys
        self.form = {key: variant(graph.operators[key[0]], key[1]) for key in keys}
        self.own = {key: graph.operators[key[0]] for key in keys}
        self.writers: dict[int, set[Key]] = {}
        self.readers: dict[int, set[Key]] = {}
        self.omitting: dict[int, set[Key]] = {}
        self.passing: dict[int, set[int]] = {}
        for key, form in self.form.items():
            for tensor in form.writes:
                self.writers.setdefault(tensor, set()).add(key)
            for tensor in form.reads:
                self.readers.setdefault(tensor, set()).add(key)
            for tensor in set(self.own[key].writes) - set(form.writes):
                self.omitting.setdefault(tensor, set()).add(key)
            for tensor in set(self.own[key].reads) - set(form.reads):
                self.passing.setdefault(tensor, set()).add(key[0])

    def only_forms_write(self, tensor: int) -> bool:
        return tensor not in self.graph.producer and tensor not in self.graph.resident

    def possible(self, key: Key) -> bool:
        """Whether there is what a form reads, and nobody needs what it does not write."""
        form, own = self.form[key], self.own[key]
        lacking = any(
            self.only_forms_write(t) and t not in self.writers and t not in self.graph.tangents
            for t in form.reads
        )
        omitted = set(own.writes) - set(form.writes)
        return not lacking and all(
            set(self.graph.readers[t]) <= self.passing.get(t, set()) for t in omitted
        )

    def of_use(self, key: Key) -> bool:
        """Whether another form reads what one writes more, or omits what one does not read."""
        form, own = self.form[key], self.own[key]
        if own.phase is Phase.FORWARD:
            return any(t in self.readers for t in set(form.writes) - set(own.writes))
        passed = set(own.reads) - set(form.reads)
        again = {t for t in passed if own.phase is self._phase(t)}
        return not again or any(t in self.omitting for t in again)

    def _phase(self, tensor: int) -> Phase | None:
        producer = self.graph.producer.get(tensor)
        return None if producer is None else self.graph.operators[producer].phase


def needed(lowering: Lowering, keys: set[Key]) -> set[Key]:
    """Of forms those that can be chosen, and are of use, together with the others."""
    while True:
        needs = Needs(lowering, keys)
        left = {key for key in keys if needs.possible(key) and needs.of_use(key)}
        if left == keys:
            return keys
        keys = left


def _gaining_nothing(lowering: Lowering, keys: set[Key], byte_s: float) -> set[Key]:
    needs = Needs(lowering, keys)
    figures: dict[int, list[tuple[float, int, Key]]] = {}
    out = set()
    for key in sorted(keys):
        own = needs.own[key]
        if own.phase is Phase.FORWARD or is_product(lowering, key):
            continue
        size_bytes = kept_bytes(needs, key)
        saved_s = own.time_s - needs.form[key].time_s - more_s(needs, key)
        saved_s -= byte_s * max(0, size_bytes)
        if saved_s < GAIN * own.time_s and size_bytes >= 0:
            out.add(key)
        else:
            figures.setdefault(key[0], []).append((saved_s, size_bytes, key))
    for one in figures.values():
        for saved_s, size, key in one:
            others = ((s, b) for s, b, other in one if other != key)
            if any(s > saved_s and b <= size for s, b in others):
                out.add(key)
    return out


def is_product(lowering: Lowering, key: Key) -> bool:
    """Whether a form runs its operator's own kernel, on other tensors."""
    return lowering.nodes[key[0]].target is lowering.alternatives[key].target


def more_s(needs: Needs, key: Key) -> float:
    """The form's part of what the forward takes longer to write what only forms read."""
    total_s = 0.0
    extra = {t for t in needs.form[key].reads if needs.only_forms_write(t)}
    writers = {w for t in extra for w in needs.writers.get(t, ())}
    for op in {op for op, _ in writers}:
        ones = [w for w in writers if w[0] == op]
        slower_s, writer = min((needs.form[w].time_s - needs.own[w].time_s, w) for w in ones)
        written = set(needs.form[writer].writes) - set(needs.own[writer].writes)
        sharing = {reader for t in written for reader, _ in needs.readers.get(t, ())}
        total_s += max(0.0, slower_s) / len(sharing)
    return total_s


def kept_bytes(needs: Needs, key: Key) -> int:
    """Bytes that a form has the step keep, beyond those that its operator has it keep."""
    own: Operator = needs.own[key]
    form: Operator | Variant = needs.form[key]
    size = [tensor.size_bytes for tensor in needs.graph.tensors]
    more = sum(size[t] for t in set(form.reads) - set(own.reads) - needs.graph.resident)
    less = sum(size[t] for t in set(own.reads) - set(form.reads) - needs.graph.resident)
    return more - less + sum(size[t] for t in set(own.writes) - set(form.writes))
