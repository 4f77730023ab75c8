"""The training step that a chain describes, as a graph for strategies that plan operators.

`chain_to_graph` gives schedules of the chain's own moves their exact figures; its a^ℓ and ā^ℓ are
different tensors, between which only a schedule chooses. Here every value is one tensor: a^ℓ, what
ā^ℓ holds beside it, δ^ℓ and g_ℓ. F^ℓ writes the first two; its implementation "no save" (F_∅ and
F_ck) only a^ℓ. a^0 is there from the start, and may move to the host. δ^n is a tangent: it comes at
the loss boundary and goes with B^n. So no plan of the graph counts a^ℓ twice, nor δ^n before it is
needed.

Law: every schedule of the chain without transfers is a program of this graph (`lower_steps`), in
the same time and at most the same memory. Where the chain says ω_ā < ω_a (Rotor's Table 2 does, in
its fourth stage), a^ℓ has ω_ā: ā^ℓ contains it, and the next stage can read it there.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.models.chain import Chain, Stage
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind

NO_SAVE = "no save"


def operators_of(chain: Chain) -> Graph:
    """Return the graph of the training step that a chain describes.

    Raises:
        ValueError: an overhead that no operation can have; see `check_overheads`.
    """
    check_overheads(chain)
    return _Step(chain).graph()


class _Step:
    """Collects the tensors of a chain's step as its operators are written down."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.tensors: list[Tensor] = []
        self.activations = [self._tensor("a^0", chain.input_bytes)]
        self.beside: list[tuple[int, ...]] = [()]
        for k, stage in enumerate(chain.stages, 1):
            size = _output_bytes(stage)
            self.activations.append(self._tensor(f"a^{k}", size))
            rest = stage.saved_bytes - size
            self.beside.append((self._tensor(f"ā^{k} beside a^{k}", rest),) if rest else ())
        self.gradients = [
            self._tensor(f"δ^{k}", chain.gradient_bytes(k), TensorKind.GRADIENT)
            for k in range(len(chain) + 1)
        ]
        self.results = [self.gradients[0]]

    def graph(self) -> Graph:
        stages = tuple(enumerate(self.chain.stages, 1))
        # Not resident, as offloading moves a^0, too; nothing computes it a second time.
        operators = [Operator("input", (), (self.activations[0],), 0.0, recomputable=False)]
        operators += [self._forward(k, stage) for k, stage in stages]
        for k, stage in reversed(stages):
            operators += self._backward(k, stage)
        return Graph(
            self.tensors,
            operators,
            gradients=self.results,
            tangents=(self.gradients[-1],),
            tangents_held=False,
            extra_resident_bytes=self.chain.resident_bytes,
        )

    def _tensor(self, name: str, size_bytes: int, kind: TensorKind = TensorKind.ACTIVATION) -> int:
        self.tensors.append(Tensor(name, size_bytes, kind))
        return len(self.tensors) - 1

    def _forward(self, k: int, stage: Stage) -> Operator:
        output, beside = self.activations[k], self.beside[k]
        saving, bare = stage.forward_overhead_bytes, stage.no_save_overhead_bytes
        bare += stage.output_bytes - _output_bytes(stage)
        choice = Implementation(NO_SAVE, stage.forward_time_s, bare, writes=(output,))
        return Operator(
            f"F^{k}",
            (self.activations[k - 1],),
            (output, *beside),
            stage.forward_time_s,
            saving if beside else min(saving, bare),
            module=stage.name or f"stage {k}",
            implementations=(choice,) if beside else (),
        )

    def _backward(self, k: int, stage: Stage) -> Iterator[Operator]:
        reads = (self.gradients[k], self.activations[k - 1], self.activations[k], *self.beside[k])
        made: tuple[int, ...] = (self.gradients[k - 1],)
        overhead = stage.backward_overhead_bytes
        if stage.parameter_gradient_bytes:
            size = stage.parameter_gradient_bytes
            self.results.append(self._tensor(f"g^{k}", size, TensorKind.GRADIENT))
            made = (*made, self.results[-1])
        results, module = made, stage.name or f"stage {k}"
        if is_in_two(stage):
            overhead += sum(self.tensors[t].size_bytes for t in results)
            made = (self._tensor(f"B^{k} under way", 0, TensorKind.GRADIENT),)
        yield Operator(
            f"B^{k}",
            reads,
            made,
            stage.backward_time_s,
            max(0, overhead),
            Phase.BACKWARD,
            module=module,
        )
        if is_in_two(stage):
            yield Operator(f"B^{k}, results", made, results, 0.0, 0, Phase.BACKWARD, module=module)


def _output_bytes(stage: Stage) -> int:
    return min(stage.output_bytes, stage.saved_bytes)


def check_overheads(chain: Chain) -> None:
    """Check that operations can have a chain's overheads.

    Raises:
        ValueError: a forward's overhead is below 0, or a backward's so far below that its peak
            would be less than what it leaves behind.
    """
    for index, stage in enumerate(chain.stages, 1):
        _check_overheads(index, stage)


def _check_overheads(index: int, stage: Stage) -> None:
    owner = f"stage {index}" + (f", {stage.name!r}" if stage.name else "")
    if min(stage.forward_overhead_bytes, stage.no_save_overhead_bytes) < 0:
        raise ValueError(f"{owner}: the overhead of a forward must be at least 0 bytes")
    least_bytes = -(stage.gradient_bytes + stage.saved_bytes)
    if stage.backward_overhead_bytes < least_bytes:
        raise ValueError(
            f"{owner}: backward_overhead_bytes must be at least {least_bytes}, the sizes of the "
            f"gradient and the saved values that the backward frees, got "
            f"{stage.backward_overhead_bytes}"
        )


def is_in_two(stage: Stage) -> bool:
    """Tell whether a stage's backward is two operators: its overhead is negative."""
    return stage.backward_overhead_bytes < 0
