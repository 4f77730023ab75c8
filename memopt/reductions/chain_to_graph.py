"""Turns a user's own chain into a graph, and its schedules into programs.

Tensors are the values of Rotor §3, each on its own: a^ℓ, ā^ℓ (which contains a^ℓ, so that both
together count a^ℓ twice, as in the paper), δ^ℓ and the parameter gradients g_ℓ. A stage's forward
is one operator. By default it is F_all; F_∅ and F_ck are implementations of it that save nothing.
Each may read its input as a^{ℓ-1} or as a part of ā^{ℓ-1}. Overheads are workspace. A backward that
needs less than what it reads and writes together (o_b < 0) frees its inputs before it allocates all
its results. It becomes two operators; the second takes no time and allocates the results.

Law: a schedule and its program have the same peaks, on the device and on the host, and the same
time. δ^n, the gradient of the loss, has two semantics. Papers on recomputation charge it from the
start of the step, where an operator of its own makes it. Papers on offloading charge it only within
B^n, which has an implementation that makes it. `ChainGraph.lower` says which is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain, Stage
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.steps import FORWARD_MOVES, TRANSFER_MOVES, ChainStep, Move, has_transfers
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.replay import replay
from memopt.reductions.chain_operators import check_overheads, is_in_two, operators_of
from memopt.reductions.chain_view import ChainView

INPUT, LOSS_GRADIENT = 0, 1
"""The operators that make a^0 and δ^n; F^1 is the next one."""

_FORWARDS = {
    (False, True): None,
    (False, False): "no save",
    (True, True): "from a",
    (True, False): "no save, from a",
}
"""(whether it reads a^{ℓ-1} on its own, whether it makes ā^ℓ) → implementation."""
_BACKWARDS = {
    (False, False): None,
    (True, False): "from a",
    (False, True): "makes δ",
    (True, True): "from a, makes δ",
}
"""(whether it reads a^{ℓ-1} on its own, whether it makes δ^n itself) → implementation."""


@dataclass(frozen=True)
class ChainGraph(ChainView):
    """A chain, and the equivalent graph that `chain_to_graph` makes of it."""

    exact: ClassVar[bool] = True

    @cached_property
    def operators(self) -> Graph:
        """The chain's step for strategies that plan operators."""
        return operators_of(self.chain)

    def lower(self, steps: Sequence[ChainStep], budget_bytes: int | None = None) -> Program:
        """Lower a schedule to its program.

        δ^n is live from the start, unless the schedule moves data or would need more than
        `budget_bytes` with it: then B^n makes it. The program is not validated here:
        `memopt.programs.validate` does that.

        Raises:
            InvalidProgramError: a step of a stage that the chain does not have.
        """
        if has_transfers(steps):
            return self.with_late_gradient(steps)
        early = Program(_ChainLowering(self.chain, late_gradient=False).run(steps))
        try:
            over = budget_bytes is not None and replay(self.graph, early).peak_bytes > budget_bytes
        except InvalidProgramError:
            over = False
        return self.with_late_gradient(steps) if over else early

    def with_late_gradient(self, steps: Sequence[ChainStep]) -> Program:
        """Lower a schedule under the semantics of offloading, where B^n makes δ^n."""
        return Program(_ChainLowering(self.chain, late_gradient=True).run(steps))


def chain_to_graph(chain: Chain) -> ChainGraph:
    """Make the graph of a chain.

    Raises:
        ValueError: an overhead that no operation can have; see `check_overheads`.
    """
    check_overheads(chain)
    names = _ChainTensors(len(chain))
    tensors = [Tensor(f"a^{k}", chain.activation_bytes(k)) for k in range(len(chain) + 1)]
    tensors += [Tensor(f"ā^{k}", stage.saved_bytes) for k, stage in enumerate(chain.stages, 1)]
    tensors += [
        Tensor(f"δ^{k}", chain.gradient_bytes(k), TensorKind.GRADIENT)
        for k in range(len(chain) + 1)
    ]
    tensors += [
        Tensor(f"g^{k}", stage.parameter_gradient_bytes, TensorKind.GRADIENT)
        for k, stage in enumerate(chain.stages, 1)
    ]
    tensors += [Tensor(f"B^{k} under way", 0) for k in range(1, len(chain) + 1)]
    modules = [stage.name or str(k) for k, stage in enumerate(chain.stages, 1)]
    operators = [
        Operator("input", (), (names.activation(0),), 0.0, module=modules[0]),
        Operator("loss", (), (names.gradient(len(chain)),), 0.0, module=modules[0]),
    ]
    for k, stage in enumerate(chain.stages, 1):
        operators.append(_forward(names, k, stage, modules[k - 1]))
    for k in range(len(chain), 0, -1):
        operators += _backward(names, k, chain, modules[k - 1])
    results = (names.gradient(0), *(names.parameter(k) for k in range(1, len(chain) + 1)))
    graph = Graph(tensors, operators, gradients=results, extra_resident_bytes=chain.resident_bytes)
    return ChainGraph(graph, chain)


@dataclass(frozen=True, slots=True)
class _ChainTensors:
    """The indices of a chain's values in its graph; `length` is the number of stages."""

    length: int

    def activation(self, k: int) -> int:
        """Return a^k."""
        return k

    def saved(self, k: int) -> int:
        """Return ā^k; of k = 0, a^0."""
        return self.length + k if k else 0

    def gradient(self, k: int) -> int:
        """Return δ^k."""
        return 2 * self.length + 1 + k

    def parameter(self, k: int) -> int:
        """Return g_k."""
        return 3 * self.length + 1 + k

    def under_way(self, k: int) -> int:
        """Return the tensor of no bytes made when B^k has run but has not allocated its results."""
        return 4 * self.length + 1 + k


def _forward(names: _ChainTensors, k: int, stage: Stage, module: str) -> Operator:
    def choice(name: str | None, from_checkpoint: bool, saves: bool) -> Implementation:
        return Implementation(
            str(name),
            stage.forward_time_s,
            stage.forward_overhead_bytes if saves else stage.no_save_overhead_bytes,
            (names.activation(k - 1) if from_checkpoint else names.saved(k - 1),),
            (names.saved(k) if saves else names.activation(k),),
        )

    own, *others = (
        choice(name, from_checkpoint, saves)
        for (from_checkpoint, saves), name in _FORWARDS.items()
        if k > 1 or not from_checkpoint
    )
    return Operator(
        f"F^{k}",
        own.reads or (),
        own.writes or (),
        own.time_s,
        own.workspace_bytes,
        module=module,
        implementations=tuple(others),
    )


def _backward(names: _ChainTensors, k: int, chain: Chain, module: str) -> Iterator[Operator]:
    stage = chain.stages[k - 1]
    results = (names.gradient(k - 1), names.parameter(k))
    made: tuple[int, ...] = results
    overhead = stage.backward_overhead_bytes
    if is_in_two(stage):
        made = (names.under_way(k),)
        overhead += chain.gradient_bytes(k - 1) + stage.parameter_gradient_bytes

    def choice(source: int, gradient_inside: bool) -> tuple[tuple[int, ...], int]:
        """Return (the tensors it reads, its workspace in bytes)."""
        if gradient_inside:
            return (names.saved(k), source), max(0, overhead + stage.gradient_bytes)
        return (names.gradient(k), names.saved(k), source), max(0, overhead)

    sources = {True: names.activation(k - 1), False: names.saved(k - 1)}
    choices = [
        (name, *choice(sources[from_checkpoint], inside))
        for (from_checkpoint, inside), name in _BACKWARDS.items()
        if (k > 1 or not from_checkpoint) and (k == len(chain) or not inside)
    ]
    (_, reads, workspace_bytes), *others = choices
    yield Operator(
        f"B^{k}",
        reads,
        made,
        stage.backward_time_s,
        workspace_bytes,
        Phase.BACKWARD,
        module=module,
        implementations=tuple(
            Implementation(str(name), stage.backward_time_s, size, reads, made)
            for name, reads, size in others
        ),
    )
    if is_in_two(stage):
        yield Operator(f"B^{k}, results", made, results, 0.0, 0, Phase.BACKWARD, module=module)


class _ChainLowering:
    """Lowers one schedule; tracks which values the schedule holds, and where."""

    def __init__(self, chain: Chain, late_gradient: bool) -> None:
        self.chain = chain
        self.names = _ChainTensors(len(chain))
        self.late_gradient = late_gradient
        self.checkpoints: set[int] = set()
        self.saved = {0}
        self.returned: set[int] = set()
        """Stages fetched again whose host copy is dropped after the next reader."""
        self.begun_backward = False
        self.backward: dict[int, int] = {}
        """Backward operator of each stage."""
        following = LOSS_GRADIENT + len(chain) + 1
        for k in range(len(chain), 0, -1):
            self.backward[k] = following
            following += 2 if is_in_two(chain.stages[k - 1]) else 1

    def run(self, steps: Sequence[ChainStep]) -> Iterator[Instruction]:
        """Yield the whole program; values the schedule leaves in memory are freed at its end."""
        yield Compute(INPUT, (self.names.activation(0),))
        if not self.late_gradient:
            yield Compute(LOSS_GRADIENT, (self.names.gradient(len(self.chain)),))
        for step in steps:
            least = 0 if step.move in TRANSFER_MOVES else 1
            if not least <= step.stage <= len(self.chain):
                raise InvalidProgramError(
                    f"{step}: the chain has stages {least} to {len(self.chain)}"
                )
            yield from self._step(step)
        yield from (Free(self.names.activation(k)) for k in sorted(self.checkpoints))
        yield from (Free(self.names.saved(k)) for k in sorted(self.saved))

    def _step(self, step: ChainStep) -> Iterator[Instruction]:
        k = step.stage
        if step.move in FORWARD_MOVES:
            yield from self._forward(step)
        elif step.move is Move.BACKWARD:
            yield from self._backward(k)
        elif step.move is Move.DROP_ACTIVATION:
            yield from self._drop_checkpoint(k)
        elif step.move is Move.OFFLOAD:
            yield SwapOut(self.names.saved(k))
        elif step.move is Move.PREFETCH:
            self.saved.add(k)
            self.returned.add(k)
            yield SwapIn(self.names.saved(k))
        else:
            self.saved.discard(k)
            yield Free(self.names.saved(k))

    def _forward(self, step: ChainStep) -> Iterator[Instruction]:
        k, saves = step.stage, step.move is Move.FORWARD_ALL
        chosen = _FORWARDS[self._reads_checkpoint(k), saves]
        made = self.names.saved(k) if saves else self.names.activation(k)
        (self.saved if saves else self.checkpoints).add(k)
        yield Compute(LOSS_GRADIENT + k, (made,), chosen)
        yield from self._drop_host(k - 1)
        if step.move is Move.FORWARD_NO_SAVE:
            yield from self._drop_checkpoint(k - 1)

    def _backward(self, k: int) -> Iterator[Instruction]:
        if not self.begun_backward:
            yield LossBoundary()
        self.begun_backward = True
        makes_gradient = self.late_gradient and k == len(self.chain)
        chosen = _BACKWARDS[self._reads_checkpoint(k), makes_gradient]
        results = (self.names.gradient(k - 1), self.names.parameter(k))
        in_two = is_in_two(self.chain.stages[k - 1])
        made = (self.names.under_way(k),) if in_two else results
        yield Compute(self.backward[k], made, chosen)
        yield from self._drop_host(k)
        yield from self._drop_host(k - 1)
        if not makes_gradient:
            yield Free(self.names.gradient(k))
        self.saved.discard(k)
        yield Free(self.names.saved(k))
        if k - 1 in self.checkpoints:
            yield from self._drop_checkpoint(k - 1)
        if in_two:
            yield Compute(self.backward[k] + 1, results)
            yield Free(made[0])

    def _reads_checkpoint(self, k: int) -> bool:
        """Tell whether a^{k-1} is read on its own, not as a part of ā^{k-1}. a^0 is both."""
        return k > 1 and k - 1 not in self.saved

    def _drop_checkpoint(self, k: int) -> Iterator[Instruction]:
        self.checkpoints.discard(k)
        yield Free(self.names.activation(k))

    def _drop_host(self, k: int) -> Iterator[Instruction]:
        if k in self.returned:
            self.returned.remove(k)
            yield DropHost(self.names.saved(k))
