"""Whether a form of a region gives the bits that the region's own kernel gives, by running both.

What the form reads is computed by the kernels of the forward that write it, of random numbers, and
so is what the region's own kernel makes the same values of. No branch of a kernel depends on what
it computes, but loops with lanes and their remainders may call other functions (erf, exp...), which
round most numbers alike: so the same calls run with other numbers, small and large, until many
elements were equal, each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.models.graph import Phase
from memopt.models.variants import variant
from memopt.profiler.build import Lowering
from memopt.profiler.compiled.inductor import REFUSALS
from memopt.profiler.compiled.kernel import FusedKernel
from memopt.profiler.signature import TensorArgument, describe_value, signature
from memopt.profiler.trial import equal_bytes

Key = tuple[int, str]
"""(operator, implementation)."""
_ELEMENTS = 1 << 16
"""So many elements are compared, in as few runs as that takes..."""
_RUNS = 256
"""... but no more than these."""
_SCALES = (1.0, 0.1, 8.0, 0.01)
"""Of the random numbers, in turn."""


class SameBits:
    """Compares forms with the kernels in whose place they stand.

    Args:
        lowering: with the forms as alternatives, compiled.
        forms: the forms of regions.
        twins: tensor that a region writes again → the forward's, which is to be the same.
        device: where kernels run.
    """

    def __init__(
        self,
        lowering: Lowering,
        forms: Iterable[Key],
        twins: Mapping[int, int],
        device: torch.device,
    ) -> None:
        self._lowering, self._twins, self._device = lowering, twins, device
        self._graph = lowering.graph
        self._again = frozenset(twins.values())
        self._extra: dict[int, Key] = {}
        """Tensor that only forms write → one of them."""
        for op, name in forms:
            for tensor in variant(self._graph.operators[op], name).writes:
                if tensor not in self._graph.producer:
                    self._extra.setdefault(tensor, (op, name))
        self._known: dict[str, bool] = {}

    def of(self, op: int, name: str) -> bool:
        """Whether a form gives what its operator gives."""
        calls = self._calls(op, name)
        text = self._text(calls)
        if text not in self._known:
            try:
                # A seed is that of all devices.
                with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
                    torch.manual_seed(0)
                    self._known[text] = self._are_equal(calls)
            except REFUSALS:
                self._known[text] = False
        return self._known[text]

    def _calls(self, op: int, name: str) -> list[Node]:
        """The calls to run: those of the forward whose results the two read, each of them in all
        its forms that are asked for, then the two."""
        operators = self._graph.operators
        own, form = operators[op], variant(operators[op], name)
        read = {*own.reads, *form.reads}
        omitted = set(own.writes) - set(form.writes)
        stack = list(set(own.reads) ^ set(form.reads))
        stack += [self._twins[t] for t in omitted if t in self._twins]
        chosen: set[tuple[int, str]] = set()
        while stack:
            tensor = stack.pop()
            source = self._source(tensor)
            if source is None or source in chosen:
                continue
            chosen.add(source)
            stack += [t for t in operators[source[0]].reads if t not in read]
        found: list[Node] = []
        for one, which in sorted(chosen):
            if self._lowering.nodes[one] not in found:
                found.append(self._lowering.nodes[one])
            if which:
                found.append(self._lowering.alternatives[one, which])
        return [*found, self._lowering.nodes[op], self._lowering.alternatives[op, name]]

    def _source(self, tensor: int) -> Key | None:
        """The kernel of the forward that writes a tensor; its own form is named "". ATen's kernels
        count where their result is what a region writes again."""
        op = self._graph.producer.get(tensor)
        source = self._extra.get(tensor) if op is None else (op, "")
        if source is None or self._graph.operators[source[0]].phase is not Phase.FORWARD:
            return None
        compiled = isinstance(self._lowering.nodes[source[0]].target, FusedKernel)
        return source if compiled or tensor in self._again else None

    def _text(self, calls: Iterable[Node]) -> str:
        """Equal for calls that are equal and have the same in common."""
        numbers: dict[int | None, int] = {}
        lines = []
        for call in calls:
            held = [self._lowering.storages[one][0] for one in call.all_input_nodes]
            tensors = (*held, *self._lowering.storages[call])
            lines.append(signature(call).text)
            lines.append(str([numbers.setdefault(t, len(numbers)) for t in tensors]))
        return "\n".join(lines)

    def _are_equal(self, calls: Sequence[Node]) -> bool:
        written = [t for call in calls for t in self._lowering.storages[call] if t is not None]
        largest = max(self._lowering.bases[t].meta["val"].numel() for t in written)
        runs = min(_RUNS, -(-_ELEMENTS // largest))
        scales = itertools.islice(itertools.cycle(_SCALES), runs)
        return all(self._run(calls, scale) for scale in scales)

    def _run(self, calls: Sequence[Node], scale: float) -> bool:
        values: dict[int, Tensor] = {}
        written: dict[int, Tensor] = {}
        for call in calls:
            given = call.args, call.kwargs
            args, kwargs = map_arg(given, lambda node: self._value(node, values, scale))
            results = call.target(*args, **kwargs)  # type: ignore[operator]
            if isinstance(results, Tensor):
                results = (results,)
            for tensor, result in zip(self._lowering.storages[call], results, strict=True):
                if tensor is None:
                    continue
                if tensor in written and not equal_bytes(written[tensor], result):
                    return False
                written[tensor] = values[tensor] = result
        pairs = [(again, one) for again, one in self._twins.items() if {again, one} <= set(written)]
        return all(equal_bytes(written[again], written[one]) for again, one in pairs)

    def _value(self, node: Node, values: dict[int, Tensor], scale: float) -> Tensor:
        """The value of what a call reads; random numbers if nothing has computed it."""
        (tensor,) = self._lowering.storages[node]
        assert tensor is not None
        base = self._lowering.bases[tensor]
        if node is not base and node.op == "call_function":
            given = node.args, node.kwargs
            args, kwargs = map_arg(given, lambda one: self._value(one, values, scale))
            made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
            return made
        if tensor not in values:
            values[tensor] = _random(describe_value(base), self._device, scale)
        return values[tensor]


def _random(like: TensorArgument, device: torch.device, scale: float) -> Tensor:
    count = -(-like.storage_bytes // like.dtype.itemsize)
    if like.dtype.is_floating_point:
        return like.over((scale * torch.randn(count, device=device)).to(like.dtype))
    return like.over(torch.randint(0, 2, (count,), device=device).to(like.dtype))
