"""The step of a deep model, from the captured step of the same model with fewer equal blocks.

Operators of equal blocks repeat themselves in the forward, and in the opposite order in the
backward and in the updates. One block's operators are copied as often as blocks were left out, each
copy reading its own parameters and what its neighbours make. That the graph is periodic is not
assumed: the operators of two neighbouring blocks are compared, with the tensors that they read, and
where anything differs there is no deeper graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from memopt.models.graph import Graph, Operator, Phase
from memopt.models.periods import BlockRun, Period, longest_period, run_of

_LEAST = 3
"""Two blocks to compare, and a neighbour: the first of a run reads what is not repeated."""


class UnequalBlocksError(Exception):
    """The graph's operators do not repeat themselves block by block."""


def with_more_blocks(graph: Graph, path: str, kept: int, more: int) -> Graph:
    """Return the graph of the model with `more` further blocks among those that it has.

    Args:
        graph: of the model's step, priced or not, without alternative implementations of forward
            and backward operators.
        path: of the list of blocks in the model, such as "model.layers".
        kept: how many blocks it has in this graph.
        more: how many to add.

    Raises:
        UnequalBlocksError: the operators of its blocks differ.
    """
    return _Deepened(graph, path, kept, more).graph() if more else graph


def _key(graph: Graph, operator: Operator) -> Hashable:
    sizes = tuple(graph.tensors[t].size_bytes for t in (*operator.reads, *operator.writes))
    kinds = tuple(graph.tensors[t].kind for t in operator.reads)
    costs = operator.time_s, operator.workspace_bytes, operator.random, operator.recomputable
    return operator.target, len(operator.writes), sizes, kinds, costs, operator.collective


def _longest(graph: Graph, places: Iterable[int], parts: int = 0) -> Period:
    """Return the longest run of equal parts among the operators from the first to the last place,
    and as many behind as one of so many parts has.

    Raises:
        UnequalBlocksError: there is none.
    """
    listed = sorted(places)
    if not listed:
        raise UnequalBlocksError
    start, end = listed[0], listed[-1] + 1
    end += (end - start) // parts if parts else 0
    keys = [_key(graph, operator) for operator in graph.operators[start:end]]
    found = longest_period(keys, lambda _one, _other: True, _LEAST)
    if found is None:
        raise UnequalBlocksError
    return replace(found, start=found.start + start)


def _runs(graph: Graph, path: str) -> tuple[BlockRun, ...]:
    """Find the runs of the blocks' forward, backward and, if there are any, updates."""
    inside = f"{path}."
    phases: dict[Phase, list[int]] = {phase: [] for phase in Phase}
    for place, operator in enumerate(graph.operators):
        phases[operator.phase].append(place)
    own = [i for i in phases[Phase.FORWARD] if graph.operators[i].module.startswith(inside)]
    forward = BlockRun(_longest(graph, own), 1, 0)
    numbers = {
        t: forward.number(i)
        for i in range(forward.parts.start, forward.parts.end)
        for t in graph.operators[i].writes
    }
    runs = [forward]
    for phase, way in ((Phase.BACKWARD, -1), (Phase.UPDATE, 1)):
        reading = [i for i in phases[phase] if numbers.keys() & set(graph.operators[i].reads)]
        if not phases[phase]:
            continue
        run = BlockRun(_longest(graph, reading, forward.parts.count), way, 0)
        found = []
        for part in range(1, run.parts.count - 1):
            reads = (graph.operators[i].reads for i in run.parts.positions(part))
            read = [numbers[t] for tensors in reads for t in tensors if t in numbers]
            found.append(max(read) - way * part if read else None)
        if len(set(found)) != 1 or found[0] is None:
            raise UnequalBlocksError
        runs.append(replace(run, first=found[0]))
        numbers |= {
            t: runs[-1].number(i)
            for i in range(run.parts.start, run.parts.end)
            for t in graph.operators[i].writes
        }
    return tuple(runs)


class _Deepened:
    """Copies block `cut` of a graph; see `with_more_blocks`.

    A family is a tensor of every block: its key leads to the tensor of each block's number.
    """

    def __init__(self, graph: Graph, path: str, kept: int, more: int) -> None:
        self._graph, self._inside, self._blocks = graph, f"{path}.", more
        self._runs = runs = _runs(graph, path)
        # A part may be less than a block: two equal halves of it repeat themselves twice as often.
        self._more = more * max(1, round(runs[0].parts.count / kept))
        # A run's first block reads from outside: the lowest of the forward, the highest of the
        # backward. A higher cut than the lowest keeps what reads it within the run, too.
        low = max(run.numbers[0] + (run.way > 0) for run in runs)
        high = min(run.numbers[-1] - (run.way < 0) for run in runs)
        if high < low + 1:
            raise UnequalBlocksError
        self._cut = min(low + 1, high - 1)
        self._family: dict[int, tuple[Hashable, int]] = {}
        self._members: dict[Hashable, dict[int, int]] = {}
        for run in runs:
            self._add_families(run)
        for run in runs:
            self._compare(run)
        self._tensors = list(graph.tensors)
        self._copies: dict[tuple[Hashable, int], int] = {}
        for key, members in self._members.items():
            self._copy(key, members)

    def _add_families(self, run: BlockRun) -> None:
        operators, cut = self._graph.operators, self._cut
        for number in run.numbers:
            for offset in range(run.parts.length):
                for rank, tensor in enumerate(operators[run.at(number, offset)].writes):
                    self._add(tensor, (run.way, run.parts.start, offset, rank), number)
        for offset in range(run.parts.length):
            one, other = (operators[run.at(n, offset)].reads for n in (cut, cut + 1))
            for rank, (a, b) in enumerate(zip(one, other, strict=True)):
                if a == b or a not in self._graph.resident or a in self._family:
                    continue
                for number in run.numbers:
                    tensor = operators[run.at(number, offset)].reads[rank]
                    if tensor in self._graph.resident and tensor not in self._family:
                        self._add(tensor, ("resident", run.parts.start, offset, rank), number)

    def _add(self, tensor: int, key: Hashable, number: int) -> None:
        self._family[tensor] = key, number
        self._members.setdefault(key, {})[number] = tensor

    def _compare(self, run: BlockRun) -> None:
        """Check that a block and the next read the same tensors, or each its own ones.

        Raises:
            UnequalBlocksError: they do not.
        """
        for offset in range(run.parts.length):
            pair = [self._graph.operators[run.at(n, offset)] for n in (self._cut, self._cut + 1)]
            for a, b in zip(pair[0].reads, pair[1].reads, strict=True):
                own, others = self._family.get(a), self._family.get(b)
                if own is None or others is None:
                    equal = a == b
                else:
                    equal = own[0] == others[0] and others[1] == own[1] + 1
                if not equal:
                    raise UnequalBlocksError

    def _copy(self, key: Hashable, members: dict[int, int]) -> None:
        """Add the copies of a family's tensor to the graph's tensors, and rename later ones."""
        one, other = members.get(self._cut), members.get(self._cut + 1)
        if one is None or other is None:
            return
        tensor = self._graph.tensors[one]
        names = tensor.name, self._graph.tensors[other].name
        for number in range(1, self._more + 1):
            self._copies[key, number] = len(self._tensors)
            name = _renumbered(tensor.name, names, number)
            self._tensors.append(replace(tensor, name=name))
        for number, later in members.items():
            if number > self._cut:
                name = _renumbered(self._graph.tensors[later].name, names, self._more)
                self._tensors[later] = replace(self._tensors[later], name=name)

    def _member(self, key: Hashable, number: int) -> int:
        """Return the tensor of a family in a block of the deeper model."""
        if number <= self._cut:
            return self._members[key][number]
        if number <= self._cut + self._more:
            return self._copies[key, number - self._cut]
        return self._members[key][number - self._more]

    def _instance(self, run: BlockRun, number: int, offset: int, by: int) -> Operator:
        """Return an operator of block `number` as one of a block `by` later in the deeper model."""
        operator = self._graph.operators[run.at(number, offset)]
        if operator.implementations and operator.phase is not Phase.UPDATE:
            raise UnequalBlocksError

        def mapped(tensors: tuple[int, ...]) -> tuple[int, ...]:
            found = (self._family.get(t, (None, 0)) for t in tensors)
            return tuple(
                tensor if key is None else self._member(key, own + by)
                for tensor, (key, own) in zip(tensors, found, strict=True)
            )

        pair = [self._graph.operators[run.at(self._cut + i, offset)].module for i in (0, 1)]
        copied = number == self._cut and by
        return replace(
            operator,
            name=f"{operator.name}+{by}" if copied else operator.name,
            module=_renumbered(operator.module, (pair[0], pair[1]), by) if by else operator.module,
            reads=mapped(operator.reads),
            writes=mapped(operator.writes),
            in_place=mapped(operator.in_place),
        )

    def _operators(self) -> Iterator[Operator]:
        cut, more = self._cut, self._more
        forward = self._runs[0]
        names = (self._graph.operators[forward.at(cut, i)] for i in range(forward.parts.length))
        copied = max((self._block_of(operator.module) for operator in names), default=0)
        for place, operator in enumerate(self._graph.operators):
            run = run_of(self._runs, place)
            if run is None:
                self._check_outside(operator)
                yield replace(operator, module=self._moved_on(operator.module, copied))
                continue
            number, offset = run.number(place), run.offset(place)
            if number == cut and run.way < 0 and offset == 0:
                yield from self._copied(run, range(more, 0, -1))
            yield self._instance(run, number, offset, 0 if number <= cut else more)
            if number == cut and run.way > 0 and offset == run.parts.length - 1:
                yield from self._copied(run, range(1, more + 1))

    def _block_of(self, module: str) -> int:
        """Return the number of the block that a module is in; -1: in none."""
        number = module.removeprefix(self._inside).partition(".")[0]
        return int(number) if module.startswith(self._inside) and number.isdecimal() else -1

    def _moved_on(self, module: str, copied: int) -> str:
        """Return the name of a module that is behind the copied block, if it is, in the deeper
        model."""
        number = self._block_of(module)
        if number <= copied:
            return module
        rest = module.removeprefix(f"{self._inside}{number}")
        return f"{self._inside}{number + self._blocks}{rest}"

    def _check_outside(self, operator: Operator) -> None:
        """Refuse an operator between the runs that may read something of every block.

        Raises:
            UnequalBlocksError: it reads several blocks' tensors, or those of the copied block where
                that is not the edge of a run.
        """
        read = [self._family[t] for t in operator.reads if t in self._family]
        numbers = [number for _, number in read]
        if self._cut not in numbers:
            return
        lowest = max(run.numbers[0] for run in self._runs if run.way < 0 or len(self._runs) == 1)
        at_edge = operator.phase is not Phase.FORWARD and self._cut == lowest
        if not at_edge or len(dict(read)) < len(set(read)):
            raise UnequalBlocksError

    def _copied(self, run: BlockRun, numbers: Iterable[int]) -> Iterator[Operator]:
        for number in numbers:
            for offset in range(run.parts.length):
                yield self._instance(run, self._cut, offset, number)

    def _listed(self, tensors: Iterable[int]) -> Iterator[int]:
        """Yield tensors, and the copies of those that have copies."""
        for tensor in tensors:
            yield tensor
            key, number = self._family.get(tensor, ("", -1))
            if number == self._cut:
                yield from (self._copies[key, k] for k in range(1, self._more + 1))

    def graph(self) -> Graph:
        """Return the deeper graph."""
        graph = self._graph
        if any(self._family.get(t, ("", -1))[1] == self._cut for t in graph.outputs):
            raise UnequalBlocksError
        try:
            operators = tuple(self._operators())
        except KeyError as error:
            raise UnequalBlocksError from error
        return replace(
            graph,
            tensors=tuple(self._tensors),
            operators=operators,
            gradients=tuple(self._listed(graph.gradients)),
            allocator_owned=tuple(self._listed(graph.allocator_owned)),
            movable=tuple(self._listed(graph.movable)),
        )


def _renumbered(name: str, neighbours: tuple[str, str], by: int) -> str:
    """Return a name with its number increased by `by`. The number is the part in which the names of
    two neighbours of its family differ."""
    one, other = (text.split(".") for text in neighbours)
    parts = name.split(".")
    unlike = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    if len({len(one), len(other), len(parts)}) != 1 or len(unlike) != 1:
        return name
    (place,) = unlike
    if not all(text[place].isdecimal() for text in (one, other, parts)):
        return name
    parts[place] = str(int(parts[place]) + by * (int(other[place]) - int(one[place])))
    return ".".join(parts)
