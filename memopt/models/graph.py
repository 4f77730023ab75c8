"""The DAG cost model: tensors (storages), operators, and the graph of one training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.checks import check_figures, check_sums
from memopt.models.codec import NAME, SPARSE
from memopt.models.collective import Collective
from memopt.models.graph_checks import check_implementations, check_written_back


class TensorKind(StrEnum):
    """The kind of values that a storage holds."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OUTPUT = "output"


RESIDENT_KINDS = frozenset(
    {
        TensorKind.INPUT,
        TensorKind.PARAMETER,
        TensorKind.BUFFER,
        TensorKind.CONSTANT,
        TensorKind.OPTIMIZER_STATE,
    }
)


class Phase(StrEnum):
    """The part of a training step an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One device storage; views share it.

    Attributes:
        name: for people; leads back to the user's modules.
        size_bytes: as the device's allocator counts it.
        kind: of its values; INPUT, PARAMETER, BUFFER, CONSTANT and OPTIMIZER_STATE are
            resident: live during the whole step, never computed, freed or counted twice.
    """

    name: str
    size_bytes: int
    kind: TensorKind = TensorKind.ACTIVATION

    def __post_init__(self) -> None:
        check_figures(self, "Tensor", ("size_bytes",))

    @property
    def resident(self) -> bool:
        """Whether the tensor is live during the whole step."""
        return self.kind in RESIDENT_KINDS


@dataclass(frozen=True, slots=True)
class Implementation:
    """One of several ways to run an operator (MONeT §3).

    Attributes:
        name: unique within the operator.
        time_s: seconds.
        workspace_bytes: peak during the call, minus its outputs.
        reads: tensor indices it needs; None: the operator's own.
        writes: tensor indices it produces; None: the operator's own.
        exact: whether it gives the operator's results bit for bit.
        in_place: as the operator's, under this implementation: the first tensor it writes may
            take over the storage of one of these.
        packed: whether it writes or reads a tensor that only implementations have, an operand in
            few bits (MONeT's intermediate-activated operators).
        on_host: whether the host runs it, beside the device: an update whose parameter and state
            live there. It reads the host copies of the operator's operands, so that `reads` is
            (), and `workspace_bytes` is host memory.
    """

    name: str
    time_s: float
    workspace_bytes: int = 0
    reads: tuple[int, ...] | None = None
    writes: tuple[int, ...] | None = None
    exact: bool = True
    in_place: tuple[int, ...] = field(default=(), metadata=SPARSE)
    packed: bool = field(default=False, metadata=SPARSE)
    on_host: bool = field(default=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        if self.on_host and (self.reads != () or self.writes):
            raise ValueError(f"Implementation {self.name!r}: on the host it reads=(), writes none")
        check_figures(self, "Implementation", ("workspace_bytes",), ("time_s",))


@dataclass(frozen=True, slots=True)
class Operator:
    """One real kernel call, together with the views of its results.

    Attributes:
        name: canonical and unique in its graph.
        reads: indices of the tensors it reads (resident ones included).
        writes: indices of the tensors it writes, none of them resident.
        time_s: seconds.
        workspace_bytes: peak memory during the call minus its outputs, bytes.
        phase: forward, backward or update.
        recomputable: whether it may run more than once.
        random: whether it draws random numbers (a re-run restores the generator's state).
        module: the user's module it comes from, "layers.3.attn"; "" if unknown.
        target: the kernel, "aten.convolution.default"; "" if unknown.
        implementations: other ways to run it; () means only the default one.
        in_place: tensors among its reads whose storage its first output may take over, under the
            default implementation (MONeT appendix C.1).
        collective: its transfer over the network; None: it computes. A collective starts where a
            program runs it, `time_s` is its time on the network, and its first reader waits for it.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_s: float
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    random: bool = False
    module: str = ""
    target: str = ""
    implementations: tuple[Implementation, ...] = ()
    in_place: tuple[int, ...] = field(default=(), metadata=SPARSE)
    collective: Collective | None = field(default=None, metadata=SPARSE)

    on_host: ClassVar[bool] = False
    """As `Implementation.on_host`: the default implementation runs on the device."""

    def __post_init__(self) -> None:
        if self.collective and (self.implementations or self.in_place or self.random):
            raise ValueError(
                f"Operator {self.name!r}: a collective runs one way, over nothing and without "
                "random numbers"
            )
        check_figures(self, "Operator", ("workspace_bytes",), ("time_s",))
        if len(set(self.writes)) != len(self.writes):
            raise ValueError(f"Operator {self.name!r}: writes lists a tensor twice")

    @property
    def changes_in_place(self) -> bool:
        """Whether it changes the parameters and the optimizer state that it reads."""
        return self.phase is Phase.UPDATE and not self.writes

    @property
    def has_effects(self) -> bool:
        """Whether it must run even if nothing reads its results: updates, random draws (they
        move the generator for all later draws), collectives (for which the other ranks wait),
        and operators that write nothing."""
        acts = self.phase is Phase.UPDATE or self.random or self.collective is not None
        return acts or not self.writes


@dataclass(frozen=True)
class Graph:
    """One training step: operators in the framework's own order, forward first.

    Attributes:
        tensors: every storage; operators refer to them by index.
        operators: a topological order; all forward operators before all others.
        outputs: forward tensors the user receives; live from their computation to the end.
        gradients: tensors the step must end with (parameter and input gradients).
        tangents: gradients of the outputs; they appear at the loss boundary.
        tangents_held: whether tangents stay live to the end of the step, which depends on the
            torch version; else they may be freed after their last reader.
        boundary_bytes: memory of the user's loss at the boundary, on top of everything live.
        extra_resident_bytes: resident bytes that belong to no tensor of the graph.
        allocator_owned: computed tensors that a placement leaves to the allocator: their kernels
            cannot write at a given address, or the user keeps them.
        movable: resident tensors that a program may keep on the host between steps and swap in
            where they are read (whole steps; `memopt.programs.moved`). Not a tensor that an
            operator writes by another name.
        repeated: whether movable tensors may stay on the device from one step to the next.
        written_back: outputs that are new values of buffers and inputs, which no operator reads and
            which the framework copies there when the forward is over: the loss boundary reads and
            ends them.
        input_gradients: those of `gradients` that are of inputs alone, if none is of both.
    """

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    tangents_held: bool = True
    boundary_bytes: int = 0
    extra_resident_bytes: int = 0
    allocator_owned: tuple[int, ...] = field(default=(), metadata={**SPARSE, NAME: "outside"})
    movable: tuple[int, ...] = field(default=(), metadata=SPARSE)
    repeated: bool = field(default=False, metadata=SPARSE)
    written_back: tuple[int, ...] = field(default=(), metadata=SPARSE)
    input_gradients: tuple[int, ...] = field(default=(), metadata=SPARSE)

    linearizer: ClassVar[Callable[[Graph], Chain]]
    """Makes the chain of `to_chain`; `memopt.reductions` sets it, as rooms import downwards
    only."""

    def __init__(
        self,
        tensors: Iterable[Tensor],
        operators: Iterable[Operator],
        outputs: Iterable[int] = (),
        gradients: Iterable[int] = (),
        tangents: Iterable[int] = (),
        tangents_held: bool = True,
        boundary_bytes: int = 0,
        extra_resident_bytes: int = 0,
        allocator_owned: Iterable[int] = (),
        movable: Iterable[int] = (),
        repeated: bool = False,
        written_back: Iterable[int] = (),
        input_gradients: Iterable[int] = (),
    ) -> None:
        for name, value in (
            ("tensors", tuple(tensors)),
            ("operators", tuple(operators)),
            ("outputs", tuple(outputs)),
            ("gradients", tuple(gradients)),
            ("tangents", tuple(tangents)),
            ("tangents_held", bool(tangents_held)),
            ("boundary_bytes", boundary_bytes),
            ("extra_resident_bytes", extra_resident_bytes),
            ("allocator_owned", tuple(allocator_owned)),
            ("movable", tuple(movable)),
            ("repeated", bool(repeated)),
            ("written_back", tuple(written_back)),
            ("input_gradients", tuple(input_gradients)),
        ):
            object.__setattr__(self, name, value)
        check_figures(self, "Graph", ("boundary_bytes", "extra_resident_bytes"))
        ways = self.operators + tuple(i for x in self.operators for i in x.implementations)
        sizes = [*(t.size_bytes for t in self.tensors), *(way.workspace_bytes for way in ways)]
        sizes += [self.boundary_bytes, self.extra_resident_bytes]
        check_sums("Graph", sizes, (way.time_s for way in ways))
        self._check()

    def _check(self) -> None:
        for index in self.tangents:
            if not 0 <= index < len(self.tensors):
                raise ValueError(f"Graph: there is no tensor {index}, a tangent")
            if self.tensors[index].resident:
                name = self.tensors[index].name
                raise ValueError(f"Graph: the tangent {name!r} cannot be resident")
        available = {i for i, tensor in enumerate(self.tensors) if tensor.resident}
        available |= set(self.tangents)
        written: set[int] = set()
        names: set[str] = set()
        forward_over = False
        for operator in self.operators:
            owner = f"Graph: operator {operator.name!r}"
            if operator.name in names:
                raise ValueError(f"{owner}: the name is used twice")
            names.add(operator.name)
            if forward_over and operator.phase is Phase.FORWARD:
                raise ValueError(f"{owner}: a forward operator after the first backward one")
            forward_over = operator.phase is not Phase.FORWARD
            for index in (*operator.reads, *operator.writes):
                if not 0 <= index < len(self.tensors):
                    raise ValueError(f"{owner}: there is no tensor {index}")
            for index in operator.reads:
                if index not in available:
                    name = self.tensors[index].name
                    raise ValueError(f"{owner}: reads {name!r} before anything writes it")
                if operator.phase is Phase.FORWARD and index in self.tangents:
                    raise ValueError(f"{owner}: a forward operator reads a tangent")
            for index in operator.writes:
                if index in written or self.tensors[index].resident or index in self.tangents:
                    name = self.tensors[index].name
                    raise ValueError(f"{owner}: {name!r} cannot be written here")
            check_implementations(self, operator)
            written.update(operator.writes)
            available.update(operator.writes)
        for index in self.allocator_owned:
            if index not in self.computed:
                raise ValueError(f"Graph: tensor {index}, outside the arena, is never computed")
        for index in (*self.outputs, *self.gradients):
            if index not in available:
                raise ValueError(f"Graph: result tensor {index} is never computed")
        results = {*self.outputs, *self.gradients}
        if not results.issuperset(self.input_gradients):
            raise ValueError("Graph: an input gradient is not among the gradients")
        check_written_back(self)
        for index in self.movable:
            if index not in self.resident or index in results:
                raise ValueError(f"Graph: tensor {index} is movable: resident, and no result")

    @cached_property
    def resident(self) -> frozenset[int]:
        """Indices of the resident tensors."""
        return frozenset(i for i, tensor in enumerate(self.tensors) if tensor.resident)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that are live during the whole step, whatever the plan."""
        return self.extra_resident_bytes + sum(self.tensors[i].size_bytes for i in self.resident)

    @cached_property
    def movable_bytes(self) -> int:
        """Bytes of the resident tensors that a program may keep on the host."""
        return sum(self.tensors[i].size_bytes for i in self.movable)

    @cached_property
    def producer(self) -> dict[int, int]:
        """Tensor index → index of the operator that writes it."""
        return {t: i for i, operator in enumerate(self.operators) for t in operator.writes}

    @cached_property
    def computed(self) -> frozenset[int]:
        """Indices of the tensors that an operator writes, under one of its implementations."""
        chosen = (c.writes or () for operator in self.operators for c in operator.implementations)
        return frozenset(self.producer).union(*chosen)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the indices of the operators that read it, ascending."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for i, operator in enumerate(self.operators):
            for tensor in dict.fromkeys(operator.reads):
                readers[tensor].append(i)
        return tuple(map(tuple, readers))

    @cached_property
    def first_backward(self) -> int:
        """Index of the first operator that is not forward; len(operators) if there is none."""
        for i, operator in enumerate(self.operators):
            if operator.phase is not Phase.FORWARD:
                return i
        return len(self.operators)

    @property
    def is_forward(self) -> bool:
        """Whether there is no backward: an inference, or any DAG."""
        return self.first_backward == len(self.operators) and not self.tangents

    @cached_property
    def kept(self) -> frozenset[int]:
        """Computed tensors that must be live at the end: outputs and gradients, and tangents if the
        framework holds them. A strategy may count those `written_back` among them, so few bytes
        that it may take them as live to the end."""
        held = self.tangents if self.tangents_held else ()
        return frozenset((*self.outputs, *self.gradients, *held)) - self.resident

    @cached_property
    def kept_to_end(self) -> frozenset[int]:
        """Those of `kept` that are live at the end of every program."""
        return self.kept.difference(self.written_back)

    @cached_property
    def compute_time_s(self) -> float:
        """Seconds of every operator once but collectives: a lower bound for every plan with one
        stream."""
        return sum(x.time_s for x in self.operators if x.collective is None)

    @cached_property
    def network_time_s(self) -> float:
        """Seconds of every collective once: a lower bound for every plan, too."""
        return sum(x.time_s for x in self.operators if x.collective is not None)

    def to_chain(self) -> Chain:
        """Return the chain of articulation points; see `memopt.reductions.linearize`."""
        return type(self).linearizer(self)
