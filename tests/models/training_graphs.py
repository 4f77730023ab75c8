"""Training graphs and chain schedules for the tests of linearize, lower and coarsen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.steps import ChainStep, Move
from memopt.reductions.chain_replay import ChainState
from tests.strategies.offload.replay_offload import replay_offload


@dataclass
class Builder:
    """A training graph written layer by layer; `backward` derives the backward operators.

    An operator's backward reads the gradients of its outputs and what it saves, and writes the
    gradients of its parameter-dependent operands and of its parameters.
    """

    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    tangents: list[int] = field(default_factory=list)
    saves: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list
    )
    needs_gradient: set[int] = field(default_factory=set)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def tensor(self, name: str, size: int, kind: TensorKind = TensorKind.ACTIVATION) -> int:
        self.tensors.append(Tensor(f"{name}.{len(self.tensors)}", size, kind))
        if kind is TensorKind.PARAMETER:
            self.needs_gradient.add(len(self.tensors) - 1)
        return len(self.tensors) - 1

    def parameter(self, size: int = 3) -> int:
        return self.tensor("weight", size, TensorKind.PARAMETER)

    def operator(
        self,
        name: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        phase: Phase = Phase.FORWARD,
        **extra: object,
    ) -> None:
        self.operators.append(
            Operator(
                f"{name}.{len(self.operators)}",
                reads,
                writes,
                time_s=self.random.randint(0, 9) / 8,
                workspace_bytes=self.random.choice((0, 0, self.random.randint(0, 20))),
                phase=phase,
                **extra,  # type: ignore[arg-type]  # keywords of Operator
            )
        )

    def layer(
        self,
        name: str,
        reads: tuple[int, ...],
        sizes: tuple[int, ...],
        saves_inputs: tuple[int, ...] = (),
        saves_outputs: tuple[int, ...] = (),
        **extra: object,
    ) -> tuple[int, ...]:
        """A forward operator; `saves_*` are positions in its reads and writes."""
        writes = tuple(self.tensor(name, size) for size in sizes)
        self.operator(name, reads, writes, **extra)
        saved = tuple(reads[i] for i in saves_inputs) + tuple(writes[i] for i in saves_outputs)
        self.saves.append((reads, writes, saved))
        if self.needs_gradient.intersection(reads):
            self.needs_gradient.update(writes)
        return writes

    def backward(self) -> None:
        """Append the backward of everything written so far, from the outputs' tangents."""
        gradient: dict[int, int] = {}
        for output in self.outputs:
            if output in self.needs_gradient and output not in gradient:
                gradient[output] = self.tensor(
                    "tangent", self.tensors[output].size_bytes, TensorKind.GRADIENT
                )
                self.tangents.append(gradient[output])
        for reads, writes, saved in reversed(self.saves):
            incoming = tuple(gradient[t] for t in writes if t in gradient)
            if not incoming:
                continue
            wanted = [t for t in dict.fromkeys(reads) if t in self.needs_gradient]
            made = {t: self.tensor("grad", self.tensors[t].size_bytes) for t in wanted}
            if self.random.random() < 0.3 and len(wanted) > 1:
                for t in wanted:
                    self.operator("bw", incoming + saved, (made[t],), Phase.BACKWARD)
            elif wanted:
                self.operator("bw", incoming + saved, tuple(made.values()), Phase.BACKWARD)
            for t in wanted:
                if t in gradient:
                    total = self.tensor("grad", self.tensors[t].size_bytes)
                    self.operator("add", (gradient[t], made[t]), (total,), Phase.BACKWARD)
                    made[t] = total
                gradient[t] = made[t]
        self.gradients += [
            gradient[i]
            for i, t in enumerate(self.tensors)
            if t.kind is TensorKind.PARAMETER and i in gradient
        ]

    def graph(self, **extra: object) -> Graph:
        return Graph(
            self.tensors,
            self.operators,
            self.outputs,
            self.gradients,
            self.tangents,
            **extra,  # type: ignore[arg-type]  # keywords of Graph
        )


def overwriting(rng: random.Random, graph: Graph) -> Graph:
    """The graph with operators that may overwrite what only they read, sizes made equal."""
    sizes = {t: tensor.size_bytes for t, tensor in enumerate(graph.tensors)}
    operators = []
    for index, operator in enumerate(graph.operators):
        taken = ()
        if len(operator.writes) == 1 and rng.random() < 0.7:
            taken = tuple(
                t
                for t in dict.fromkeys(operator.reads)
                if graph.readers[t] == (index,)
                and t not in graph.resident | graph.kept
                and t not in graph.tangents
                and sizes[t] == sizes[operator.writes[0]]
            )
            if not taken:
                for t in operator.reads:
                    free = graph.readers[t] == (index,) and t not in graph.tangents
                    if free and t not in graph.resident | graph.kept:
                        sizes[operator.writes[0]] = sizes[t]
                        taken = (t,)
                        break
        operators.append(replace(operator, in_place=taken))
    tensors = [replace(x, size_bytes=sizes[t]) for t, x in enumerate(graph.tensors)]
    # A size changed later may undo an earlier equality.
    operators = [
        replace(
            operator,
            in_place=tuple(t for t in operator.in_place if sizes[t] == sizes[operator.writes[0]]),
            implementations=tuple(
                replace(choice, in_place=_fitting(graph, index, choice, sizes))
                for choice in operator.implementations
            ),
        )
        for index, operator in enumerate(operators)
    ]
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators))


def drawing(rng: random.Random, graph: Graph) -> Graph:
    """The graph with many random operators: about half of its own, and more in both phases that
    nothing reads, some without a result."""
    tensors = list(graph.tensors)
    operators: list[Operator] = []
    known = list(graph.resident)
    for index, operator in enumerate(graph.operators):
        if index == graph.first_backward:
            known += graph.tangents
        operators.append(replace(operator, random=rng.random() < 0.5))
        known += operator.writes
        if known and operator.phase is not Phase.UPDATE and rng.random() < 0.4:
            writes = ()
            if rng.random() < 0.7:
                writes = (len(tensors),)
                tensors.append(Tensor(f"drawn.{index}", rng.randint(0, 20)))
            operators.append(
                Operator(
                    f"draw.{index}",
                    (rng.choice(known),),
                    writes,
                    rng.randint(0, 8) / 8,
                    rng.choice((0, rng.randint(0, 9))),
                    operator.phase,
                    recomputable=rng.random() < 0.8,
                    random=True,
                )
            )
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators))


def writing_back(graph: Graph, size_bytes: int = 30) -> Graph:
    """The graph with a new buffer value from each forward operator's result, which the framework
    writes back when the forward is over, one of them a second result of the operator itself."""
    tensors, operators = list(graph.tensors), list(graph.operators[: graph.first_backward])
    first = len(tensors)
    for index, operator in enumerate(graph.operators[: graph.first_backward]):
        tensors.append(Tensor(f"new.{index}", size_bytes, TensorKind.OUTPUT))
        if index == 0 and not operator.implementations:
            operators[0] = replace(operator, writes=(*operator.writes, len(tensors) - 1))
        else:
            count = Operator(f"count.{index}", operator.writes[:1], (len(tensors) - 1,), 0.125)
            operators.insert(operators.index(operator) + 1, count)
    new = tuple(range(first, len(tensors)))
    return replace(
        graph,
        tensors=tuple(tensors),
        operators=(*operators, *graph.operators[graph.first_backward :]),
        outputs=(*new, *graph.outputs),
        written_back=new,
    )


def _fitting(
    graph: Graph, index: int, choice: Implementation, sizes: dict[int, int]
) -> tuple[int, ...]:
    """What only this operator reads and an implementation's first result may take over."""
    operator = graph.operators[index]
    reads = operator.reads if choice.reads is None else choice.reads
    writes = operator.writes if choice.writes is None else choice.writes
    kept = graph.resident | graph.kept | set(graph.tangents)
    return tuple(
        t
        for t in dict.fromkeys(reads)
        if writes
        and t not in kept
        and graph.readers[t] == (index,)
        and sizes[t] == sizes[writes[0]]
    )


def random_training_graph(seed: int, layers: int = 8) -> Graph:
    """A random network: a trunk of residual blocks and plain layers, with everything that makes
    linearizing hard: masks, batch statistics, tied weights, mid-chain outputs, long skips,
    branches to nowhere, random and non-recomputable operators."""
    rng = random.Random(seed)
    build = Builder(random=rng)
    x = build.tensor("input", rng.randint(1, 30), TensorKind.INPUT)
    tied = build.parameter()
    masks: list[int] = []
    skips: list[int] = []
    for i in range(layers):
        if rng.random() < 0.2:
            masks += build.layer("mask", (0,), (rng.randint(1, 9),))
        x = _random_block(build, rng, x, tied, masks, f"layer{i}")
        if skips and rng.random() < 0.3:
            (x,) = build.layer("join", (x, skips.pop()), (rng.randint(1, 30),), (0,))
        if rng.random() < 0.1:
            skips.append(x)
        if rng.random() < 0.15:
            build.outputs.append(x)
    build.outputs.append(x)
    build.outputs = list(dict.fromkeys(build.outputs))
    build.backward()
    return build.graph(
        tangents_held=rng.random() < 0.5,
        boundary_bytes=rng.choice((0, rng.randint(0, 200))),
        extra_resident_bytes=rng.choice((0, 17)),
    )


def _random_block(
    build: Builder, rng: random.Random, x: int, tied: int, masks: list[int], name: str
) -> int:
    size = rng.randint(1, 30)
    extra: dict[str, object] = {"module": name}
    kind = rng.choice(("linear", "norm", "residual", "aside", "dropout", "relu"))
    weight = tied if rng.random() < 0.25 else build.parameter(rng.randint(1, 9))
    use_mask = (rng.choice(masks),) if masks and rng.random() < 0.6 else ()
    if kind == "linear":
        return build.layer(name, (x, weight, *use_mask), (size,), (0, 1), **extra)[0]
    if kind == "relu":
        return build.layer(name, (x,), (size,), (), (0,), **extra)[0]
    if kind == "dropout":
        extra |= {"random": True, "recomputable": rng.random() < 0.8}
        return build.layer(name, (x,), (size, rng.randint(1, 9)), (), (1,), **extra)[0]
    if kind == "norm":
        y, _mean, running = build.layer(
            name, (x, weight), (size, 2, rng.randint(1, 5)), (0,), (1,), **extra
        )
        build.outputs.append(running)
        build.needs_gradient.discard(running)
        return y
    if kind == "aside":
        (z,) = build.layer(name, (x, weight), (size,), (0,), **extra)
        if rng.random() < 0.5:
            build.outputs.append(z)
        return x
    inner = x
    for _ in range(rng.randint(1, 3)):
        saves = rng.sample((0, 1), rng.randint(0, 2))
        reads = (inner, build.parameter(rng.randint(1, 9)), *use_mask)
        outs = rng.choice(((1, 1, 0), (1, 1, 1)))
        sizes = tuple(rng.randint(1, 30) for _ in outs[: rng.randint(1, 3)])
        inner = build.layer(name, reads, sizes, tuple(saves), (0,), **extra)[0]
    return build.layer(name, (x, inner), (size,), **extra)[0]


def random_schedule(chain: Chain, seed: int, detours: float = 0.3) -> tuple[ChainStep, ...]:
    """A valid schedule of the chain: progress towards B^1 with random detours on the way."""
    rng = random.Random(seed)
    state = ChainState(chain)
    steps: list[ChainStep] = []
    forwards = (Move.FORWARD_NO_SAVE, Move.FORWARD_CHECKPOINT, Move.FORWARD_ALL)

    def attempt(move: Move, stage: int) -> bool:
        step = ChainStep(move, stage)
        if not _allowed(state, step):
            return False
        state.apply(step)
        steps.append(step)
        return True

    while state.gradient > 0:
        goal = state.gradient
        if rng.random() < detours:
            moves = (*forwards, Move.DROP_ACTIVATION, Move.DROP_SAVED)
            attempt(rng.choice(moves), rng.randint(1, len(chain)))
            continue
        if attempt(Move.BACKWARD, goal):
            continue
        present = state.activations | state.saved
        if goal in state.saved:
            goal -= 1
        start = max(k for k in present if k < goal)
        if start + 1 == goal == state.gradient:
            attempt(Move.FORWARD_ALL, goal)
            continue
        for move in rng.sample(forwards, 3):
            if attempt(move, start + 1):
                break
    return tuple(steps)


def with_random_transfers(
    chain: Chain, steps: tuple[ChainStep, ...], seed: int, attempts: int = 30
) -> tuple[ChainStep, ...]:
    """The schedule with offloads, releases and prefetches of some ā^ℓ wherever they are valid."""
    rng = random.Random(seed)
    for _ in range(attempts):
        stage = rng.randint(0, len(chain))
        moves = (Move.OFFLOAD, Move.RELEASE, Move.PREFETCH)
        places = sorted(rng.randint(1, len(steps)) for _ in moves)
        trial = list(steps)
        for place, move in reversed(list(zip(places, moves, strict=True))):
            trial.insert(place, ChainStep(move, stage))
        try:
            replay_offload(chain, trial)
        except InvalidProgramError:
            continue
        steps = tuple(trial)
    return steps


def _allowed(state: ChainState, step: ChainStep) -> bool:
    """Whether ChainState would take the step; it may change its sets before it raises."""
    saved = (set(state.activations), set(state.saved), state.gradient, state.live_bytes)
    try:
        state.apply(step)
    except InvalidProgramError:
        allowed = False
    else:
        allowed = True
    state.activations, state.saved, state.gradient, state.live_bytes = saved
    return allowed


def store_all_steps(chain: Chain) -> tuple[ChainStep, ...]:
    """F_all of every stage, then every backward."""
    count = len(chain)
    return (
        *(ChainStep(Move.FORWARD_ALL, k) for k in range(1, count + 1)),
        *(ChainStep(Move.BACKWARD, k) for k in range(count, 0, -1)),
    )
