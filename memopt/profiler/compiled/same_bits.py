"""Whether a form of a region gives the bits that the region's own kernel gives, by running both.

What the form reads is computed by the kernels of the forward that write it, of random numbers, and
so is what the region's own kernel makes the same values of. No branch of a kernel depends on what
it computes: where every element of random tensors is equal, in every lane and remainder of a loop,
the kernels round alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
                with torch.no_grad(), torch.random.fork_rng():
                    torch.manual_seed(0)
                    self._known[text] = self._run(calls)
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
        """The kernel of the forward that writes a tensor; its own form is named ""."""
        op = self._graph.producer.get(tensor)
        source = self._extra.get(tensor) if op is None else (op, "")
        if source is None or self._graph.operators[source[0]].phase is not Phase.FORWARD:
            return None
        return source if isinstance(self._lowering.nodes[source[0]].target, FusedKernel) else None

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

    def _run(self, calls: Iterable[Node]) -> bool:
        values: dict[int, Tensor] = {}
        written: dict[int, Tensor] = {}
        for call in calls:
            args = map_arg(call.args, lambda node: self._value(node, values))
            results = call.target(*args)  # type: ignore[operator]
            for tensor, result in zip(self._lowering.storages[call], results, strict=True):
                if tensor is None:
                    continue
                if tensor in written and not equal_bytes(written[tensor], result):
                    return False
                written[tensor] = values[tensor] = result
        pairs = [(again, one) for again, one in self._twins.items() if {again, one} <= set(written)]
        return all(equal_bytes(written[again], written[one]) for again, one in pairs)

    def _value(self, node: Node, values: dict[int, Tensor]) -> Tensor:
        """The value of what a call reads; random numbers if nothing has computed it."""
        (tensor,) = self._lowering.storages[node]
        assert tensor is not None
        base = self._lowering.bases[tensor]
        if node is not base and node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), lambda one: self._value(one, values))
            made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
            return made
        if tensor not in values:
            values[tensor] = _random(describe_value(base), self._device)
        return values[tensor]


def _random(like: TensorArgument, device: torch.device) -> Tensor:
    count = -(-like.storage_bytes // like.dtype.itemsize)
    if like.dtype.is_floating_point:
        return like.over(torch.randn(count, device=device).to(like.dtype))
    return like.over(torch.randint(0, 2, (count,), device=device).to(like.dtype))
