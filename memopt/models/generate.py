"""Seeded random chains, training graphs, programs and placements, for tests and benchmarks.

Everything is drawn from the `random.Random` given, so the same seed gives the same instance.
Times are small whole numbers of seconds, so that sums of them are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from memopt.models.chain import Chain
from memopt.models.chain_rows import Shape as Shape
from memopt.models.graph import (
    Graph,
    Implementation,
    Operator,
    Phase,
    Tensor,
    TensorKind,
)


def random_chain(rng: Random, length: int, **options: Any) -> Chain:
    """Draw a chain of `length` stages, the last of which is the loss; options as of
    `Chain.random`."""
    return Chain.random(rng, length, **options)


def random_graph(
    rng: Random,
    forward_operators: int,
    *,
    max_bytes: int = 12,
    max_time_s: int = 9,
    implementations: bool = False,
    updates: bool = False,
    inference: bool = False,
) -> Graph:
    """Draw a training step: a random forward DAG and the backward that autograd would derive.

    Forward operators read up to three earlier tensors and sometimes a parameter, and write one
    or two (the second often saved for the backward only, or never read). Each backward operator
    reads the gradients of its forward operator's outputs and some of the tensors that this one
    read or wrote; several gradients of one tensor are added up. Parameter gradients, and sometimes
    the input's, are the results.

    Args:
        rng: source of randomness.
        forward_operators: how many, at least 1.
        max_bytes: the largest tensor.
        max_time_s: the longest operator.
        implementations: whether some operators have alternatives.
        updates: whether parameters are updated in the step: update operators read their
            gradient, which is no result then.
        inference: leave out the backward.
    """
    return _RandomStep(rng, max_bytes, max_time_s, implementations).step(
        forward_operators, updates, inference
    )


@dataclass
class _RandomStep:
    """Tensors and operators of a random training step under construction."""

    rng: Random
    max_bytes: int
    max_time_s: int
    implementations: bool
    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    gradients: dict[int, list[int]] = field(default_factory=dict)

    def step(self, count: int, updates: bool, inference: bool) -> Graph:
        rng = self.rng
        inputs = [self._tensor("input", TensorKind.INPUT) for _ in range(rng.randint(1, 2))]
        parameters = [
            self._tensor("weight", TensorKind.PARAMETER) for _ in range(rng.randint(1, 4))
        ]
        for _ in range(count):
            self._forward(inputs, parameters)
        outputs = self._outputs()
        tangents = () if inference else tuple(self._tangent(tensor) for tensor in outputs)
        if not inference:
            for operator in reversed(self.operators[:]):
                self._backward(operator)
        results = [] if inference else self._results(inputs, parameters, updates)
        return Graph(
            self.tensors,
            self.operators,
            outputs=outputs,
            gradients=results,
            tangents=tangents,
            tangents_held=rng.random() < 0.5,
            boundary_bytes=rng.choice([0, rng.randint(0, self.max_bytes)]),
            extra_resident_bytes=rng.choice([0, rng.randint(0, self.max_bytes)]),
        )

    def _tensor(self, name: str, kind: TensorKind, size_bytes: int | None = None) -> int:
        if size_bytes is None:
            size_bytes = 0 if self.rng.random() < 0.1 else self.rng.randint(1, self.max_bytes)
        self.tensors.append(Tensor(f"{name}.{len(self.tensors)}", size_bytes, kind))
        return len(self.tensors) - 1

    def _operator(
        self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], phase: Phase
    ) -> None:
        rng = self.rng
        workspace = rng.choice([0, rng.randint(0, self.max_bytes)])
        time_s = rng.randint(0, self.max_time_s)
        others: tuple[Implementation, ...] = ()
        if self.implementations and rng.random() < 0.4:
            others = (
                Implementation("fast", max(0, time_s - 1), workspace + rng.randint(0, 5)),
                Implementation("small", time_s + rng.randint(0, 3), workspace // 2),
            )
        self.operators.append(
            Operator(
                f"{name}.{len(self.operators)}",
                reads,
                writes,
                time_s,
                workspace,
                phase,
                recomputable=phase is not Phase.UPDATE and rng.random() < 0.9,
                random=rng.random() < 0.1,
                implementations=others,
            )
        )

    def _forward(self, inputs: list[int], parameters: list[int]) -> None:
        rng = self.rng
        computed = [tensor for operator in self.operators for tensor in operator.writes]
        recent = (inputs + computed)[-4:]
        reads = rng.sample(recent, min(len(recent), rng.randint(1, 2)))
        if rng.random() < 0.25:
            reads.append(rng.choice(inputs + computed))
        if rng.random() < 0.6:
            reads.append(rng.choice(parameters))
        writes = [self._tensor("value", TensorKind.ACTIVATION)]
        if rng.random() < 0.25:
            writes.append(self._tensor("aside", TensorKind.ACTIVATION))
        self._operator("forward", tuple(dict.fromkeys(reads)), tuple(writes), Phase.FORWARD)

    def _outputs(self) -> tuple[int, ...]:
        computed = [tensor for operator in self.operators for tensor in operator.writes]
        last = self.operators[-1].writes[0]
        others = [tensor for tensor in computed if tensor != last]
        extra = [self.rng.choice(others)] if others and self.rng.random() < 0.3 else []
        return tuple(dict.fromkeys([last, *extra]))

    def _tangent(self, tensor: int) -> int:
        size_bytes = self.tensors[tensor].size_bytes
        tangent = self._tensor("tangent", TensorKind.GRADIENT, size_bytes)
        self.gradients.setdefault(tensor, []).append(tangent)
        return tangent

    def _gradient_of(self, tensor: int) -> int | None:
        """Return the one gradient of a tensor, after adding up several contributions."""
        parts = self.gradients.get(tensor, [])
        while len(parts) > 1:
            size_bytes = self.tensors[tensor].size_bytes
            total = self._tensor("sum", TensorKind.GRADIENT, size_bytes)
            self._operator("add", (parts[0], parts[1]), (total,), Phase.BACKWARD)
            parts = self.gradients[tensor] = [total, *parts[2:]]
        return parts[0] if parts else None

    def _backward(self, forward: Operator) -> None:
        rng = self.rng
        incoming = [self._gradient_of(tensor) for tensor in forward.writes]
        reads = [tensor for tensor in incoming if tensor is not None]
        if not reads:
            return
        reads += [t for t in (*forward.reads, *forward.writes) if rng.random() < 0.6]
        writes = []
        for tensor in forward.reads:
            if self.tensors[tensor].kind is TensorKind.INPUT and rng.random() < 0.5:
                continue
            part = self._tensor("gradient", TensorKind.GRADIENT, self.tensors[tensor].size_bytes)
            self.gradients.setdefault(tensor, []).append(part)
            writes.append(part)
        if writes:
            self._operator("backward", tuple(dict.fromkeys(reads)), tuple(writes), Phase.BACKWARD)

    def _results(self, inputs: list[int], parameters: list[int], updates: bool) -> list[int]:
        found = [(tensor, self._gradient_of(tensor)) for tensor in (*parameters, *inputs)]
        results = []
        for tensor, gradient in found:
            if gradient is None:
                continue
            if updates and self.tensors[tensor].kind is TensorKind.PARAMETER:
                self._operator("update", (tensor, gradient), (), Phase.UPDATE)
            else:
                results.append(gradient)
        return results
