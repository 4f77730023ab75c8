"""The plans of calls that differ in one length: of texts, of a batch.

The fourth length that occurs begins a grid. A plan is made for the longest step of a cell, a power
of 2, and its code serves every shorter length over other numbers (`memopt.executor.sized_code`). No
tensor is padded: each step has the bits of its own length. Tensors of shorter steps are smaller, so
that the budget is kept.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.capture.any_length import any_length
from memopt.errors import MemoptError
from memopt.executor.module import for_sizes, program_of
from memopt.executor.plan_maker import Made
from memopt.executor.recaptured import with_alternatives
from memopt.executor.sized_code import SizedCode
from memopt.step.inputs import Call
from memopt.torch_private.aot import of_any_size
from memopt.torch_private.symbols import Symbols

_LOG = logging.getLogger(__name__)

Where: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""(position among a call's arguments, its dimensions of the length that varies)."""

_REMEMBERED = 8
"""How many kinds with plans of their own are compared with a new one."""
_BEFORE = 3
"""How many lengths get plans of their own before a grid begins."""
_LEAST_SHARE = 8
"""Steps shorter than this part of the longest run under the plan of the part."""
_READY = 1024
"""How many lengths of a grid stay ready to run."""
_CELLS = 12
"""How many plans a grid holds, at most."""
_SAMPLES = 6
"""How many lengths' captures code is written of, at most."""


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _tensors(kind: Any) -> dict[int, tuple[Any, ...]]:
    return {i: leaf for i, leaf in enumerate(kind[1]) if leaf[0] == "tensor"}


def where_different(one: Any, other: Any) -> Where | None:
    """Return where two kinds of calls differ, if that is in one length of tensors alone."""
    if (one[0], *one[2:]) != (other[0], *other[2:]) or len(one[1]) != len(other[1]):
        return None
    found: list[tuple[int, tuple[int, ...]]] = []
    lengths: set[tuple[int, int]] = set()
    for position, (was, now) in enumerate(zip(one[1], other[1], strict=True)):
        if was == now:
            continue
        if was[0] != "tensor" or now[0] != "tensor" or len(was[1]) != len(now[1]):
            return None
        pairs = enumerate(zip(was[1], now[1], strict=True))
        differing = [(dim, pair) for dim, pair in pairs if pair[0] != pair[1]]
        found.append((position, tuple(dim for dim, _ in differing)))
        lengths.update(pair for _, pair in differing)
    return tuple(found) if len(lengths) == 1 else None


def split(kind: Any, where: Where) -> tuple[Any, int] | None:
    """Return a kind of call without its length, and the length; None: it is not of that form."""
    leaves = list(kind[1])
    lengths: set[int] = set()
    for position, dims in where:
        if position >= len(leaves) or leaves[position][0] != "tensor":
            return None
        _, shape, strides, *rest = leaves[position]
        if len(shape) <= max(dims, default=0) or strides != _row_major(shape):
            return None
        lengths.update(shape[dim] for dim in dims)
        free = tuple(-1 if dim in dims else size for dim, size in enumerate(shape))
        leaves[position] = ("tensor", free, *rest)
    if len(lengths) != 1:
        return None
    return (kind[0], tuple(leaves), *kind[2:]), lengths.pop()


@dataclass(eq=False)
class _Cell:
    """A plan, and its code for shorter steps.

    Attributes:
        kind, call: those that it is made for.
        made: the plan.
        code: None: it is not written yet.
        tried: of how many lengths' captures it could not be written.
        ready: kind of call → the plan at its length.
    """

    kind: Any
    call: Call
    made: Made
    code: SizedCode | None = None
    tried: int = 0
    ready: OrderedDict[Any, Made] = field(default_factory=OrderedDict)


@dataclass(eq=False)
class _Grid:
    """The cells of one length's grid, by their own lengths, and all plans whose captures count."""

    where: Where
    symbols: Symbols
    samples: dict[int, Made] = field(default_factory=dict)
    cells: dict[int, _Cell] = field(default_factory=dict)

    def add(self, length: int, kind: Any, made: Made) -> None:
        """Add a plan of one length; it also serves shorter steps."""
        if len(self.samples) < _SAMPLES:
            self.samples.setdefault(length, made)
        origin = program_of(made.module).origin
        if origin is not None:
            captured = origin.halves.captured
            # Its tensors have been let go: a new trace gets the last one's answers on them.
            call = replace(captured.call, looked=captured.looked)
            self.cells[length] = _Cell(kind, call, made)
        if len(self.cells) > _CELLS:
            del self.cells[next(iter(self.cells))]


class Lengths:
    """Serves calls that differ in one length by few plans.

    Args:
        model: the model.
        kind_of: returns the kind of a call.
        ready: returns the plan that is ready for a kind of call, renewed if need be; None: none is.
        make: makes a plan for a kind of call, which is ready from then on.
        prepare: prepares a plan to be called.

    Attributes:
        why_not: why a call last got a plan of its own; "" if none did.
    """

    def __init__(
        self,
        model: nn.Module,
        kind_of: Callable[[Call], Any],
        ready: Callable[[Any, Call], Made | None],
        make: Callable[[Any, Call], Made],
        prepare: Callable[[Any, Call, Made], None],
    ) -> None:
        self._model, self._kind_of = model, kind_of
        self._ready, self._make, self._prepare = ready, make, prepare
        self.why_not = ""
        self._own: OrderedDict[Any, weakref.ref[Made]] = OrderedDict()
        self._grids: dict[tuple[Where, Any], _Grid | None] = {}

    def said(self) -> str:
        """Return why lengths share no plan, for messages; "": it is not known."""
        return f" (lengths share no plan: {self.why_not})" if self.why_not else ""

    def forget(self) -> None:
        """Drop all grids: plans are for something else from now on."""
        self._own.clear()
        self._grids.clear()

    def planned(self, kind: Any, made: Made) -> None:
        """Note that a kind of call has a plan of its own."""
        self._own[kind] = weakref.ref(made)
        self._own.move_to_end(kind)
        if len(self._own) > _REMEMBERED:
            self._own.popitem(last=False)
        for length, grid in self._grids_of(kind):
            grid.add(length, kind, made)

    def met_as(self, kind: Any) -> tuple[Any, float]:
        """Return the kind whose plan serves a kind of call, and how many times as long it is."""
        for length, grid in self._grids_of(kind):
            for size, cell in grid.cells.items():
                if kind in cell.ready:
                    return cell.kind, size / length
        return kind, 1.0

    def made(self, kind: Any, call: Call) -> Made | None:
        """Return a plan for a call, made for a longer one; None: it needs a plan of its own."""
        found = next(self._grids_of(kind), None) or self._begun(kind, call)
        if found is None:
            return None
        length, grid = found
        for cell in list(grid.cells.values()):
            if kind in cell.ready and self._renewed(cell) and kind in cell.ready:
                cell.ready.move_to_end(kind)
                return cell.ready[kind]
        return self._of_grid(grid, kind, call, length) if grid.symbols.holds(length) else None

    def _grids_of(self, kind: Any) -> Iterator[tuple[int, _Grid]]:
        """Yield grids for a kind of call, with its length."""
        for (where, form), grid in list(self._grids.items()):
            found = split(kind, where)
            if found is not None and found[0] == form and grid is not None:
                yield found[1], grid

    def _begun(self, kind: Any, call: Call) -> tuple[int, _Grid] | None:
        """Begin a grid, if this is the fourth length in which calls differ."""
        known: dict[tuple[Where, Any, int], dict[int, tuple[Any, Made]]] = {}
        for other, reference in self._own.items():
            made, where = reference(), where_different(other, kind)
            mine = None if where is None else split(kind, where)
            theirs = None if where is None else split(other, where)
            if where is None or mine is None or theirs is None or made is None:
                continue
            if min(mine[1], theirs[1]) > 1:  # torch traces a length of 1 otherwise than others
                known.setdefault((where, *mine), {})[theirs[1]] = other, made
        for (*form, length), samples in known.items():
            key = form[0], form[1]
            if len(samples) < _BEFORE or key in self._grids:
                continue
            symbols = any_length(self._model, call, dict(key[0]))
            if symbols is not None and all(map(symbols.holds, (length, *samples))):
                grid = self._grids[key] = _Grid(key[0], symbols)
                for shorter, (other, made) in samples.items():
                    grid.add(shorter, other, made)
                return length, grid
            self._grids[key] = None
            self.why_not = "the model decides by its length, or cannot be traced without it"
        return None

    def _of_grid(self, grid: _Grid, kind: Any, call: Call, length: int) -> Made | None:
        size, cell = self._cell(grid, call, length)
        if size == length:
            return cell.made
        if cell.code is None and cell.tried < len(grid.samples):
            cell.tried = len(grid.samples)
            cell.code = self._code(grid, size, cell)
        reason = self.why_not if cell.code is None else cell.code.why_not(length)
        if cell.code is None or reason is not None:
            self.why_not = str(reason)
            _LOG.info("a call of length %d has a plan of its own: %s", length, reason)
            return None
        longer = cell.made
        module = for_sizes(longer.module, cell.code.at(length), call)
        made = Made(module, longer.plan, longer.charges, longer.enough)
        self._prepare(kind, call, made)
        cell.ready[kind] = made
        if len(cell.ready) > _READY:
            cell.ready.popitem(last=False)
        return made

    def _cell(self, grid: _Grid, call: Call, length: int) -> tuple[int, _Cell]:
        """Return the cell of a length, with its own, made now if there is none."""
        most = self._size(grid, length)
        for size, cell in sorted(grid.cells.items()):
            if size < length or (size > most and cell.made.plan.overhead > 0):
                continue
            if self._renewed(cell):
                return size, cell
            del grid.cells[size]
        for size in dict.fromkeys((most, length)):
            longer = _of_length(call, grid.where, size)
            kind = self._kind_of(longer)
            try:
                made = self._ready(kind, longer) or self._make(kind, longer)
                break
            except (MemoptError, ValueError, RuntimeError, IndexError) as error:
                # The longest step of the cell need not be possible, or fit.
                if size == length:
                    raise
                _LOG.info("no plan for length %d: %s", size, error)
        assert made is not None
        grid.add(size, kind, made)
        return size, grid.cells.setdefault(size, _Cell(kind, longer, made))

    def _renewed(self, cell: _Cell) -> bool:
        """Take the plan that is ready for a cell now; return False if it was displaced."""
        known = self._ready(cell.kind, cell.call)
        if known is not None and known is not cell.made:
            cell.made, cell.code, cell.tried = known, None, 0
            cell.ready.clear()
        return known is not None

    def _size(self, grid: _Grid, length: int) -> int:
        """Return the length of the cell that a length is in: a power of 2, or the longest that the
        model can take."""
        longest = max(length, *grid.samples, *grid.cells)
        size = max(_power_of_2(length), _power_of_2(longest) // _LEAST_SHARE)
        while size > length and not grid.symbols.holds(size):
            size -= 1
        return size

    def _code(self, grid: _Grid, size: int, cell: _Cell) -> SizedCode | None:
        """Write the code of a cell's plan for other lengths; None: it cannot be."""
        plan, program = cell.made.plan, program_of(cell.made.module)
        captures = {}
        try:
            for length, made in ((size, cell.made), *grid.samples.items()):
                origin = program_of(made.module).origin
                if origin is None:
                    raise ValueError("the plan has addresses")
                captured, lowering = origin.halves.captured, origin.halves.lowering
                if length not in captures:
                    lowering = with_alternatives(plan, self._model, captured, lowering)
                    captures[length] = captured, lowering
            code = SizedCode(program, captures, grid.symbols.degree)
        except (ValueError, MemoptError) as error:
            self.why_not = str(error)
            return None
        of_any_size(captures[size][0].hooks.tangents)
        return code


def _power_of_2(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _of_length(call: Call, where: Where, size: int) -> Call:
    """Return a call whose tensors, repeated, have another length."""
    dims_at = dict(where)

    def longer(position: int, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach()
        for dim in dims_at[position]:
            rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
            made = made.index_select(dim, rows)
        return made.requires_grad_(tensor.requires_grad)

    return call.with_tensors_at(dims_at, longer)
