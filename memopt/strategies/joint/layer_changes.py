"""Changes of many equal layers at once: of a whole stretch, of its halves, of their halves, ..."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from memopt.strategies.joint.equal_layers import EqualLayers
from memopt.strategies.shared.run_table import RunTable


class LayerChangeKind(Enum):
    """What is changed."""

    WITHOUT = auto()
    """All runs but the first are left out."""
    AGAIN = auto()
    """A result is computed again before the reader that comes after its longest gap."""
    TOGGLE = auto()
    """Whether a result moves first, or stays."""
    VARIANT = auto()
    """The implementation."""


class LayerChange(NamedTuple):
    """A change of operators at one place of equal layers, or of all of their operators.

    Attributes:
        kind: what is changed.
        operators: the operators.
        place: of the result among those that they write; of the implementation among the others.
        option: AGAIN: whether operands that are no longer in memory are computed again, too.
            TOGGLE: whether they move first.
    """

    kind: LayerChangeKind
    operators: range
    place: int = 0
    option: bool = False


def layer_changes(table: RunTable) -> Iterator[LayerChange]:
    """Yield every change that any runs of a graph can have; in given runs many of them change
    nothing."""
    for stretch, layers in EqualLayers.of(table.graph).parts():
        begin, period = stretch.at(layers[0], 0), stretch.length
        end = begin + len(layers) * period
        yield LayerChange(LayerChangeKind.WITHOUT, range(begin, end))
        for place in range(begin, begin + period):
            yield from _changes_of_place(table, range(place, end, period))


def _changes_of_place(table: RunTable, operators: range) -> Iterator[LayerChange]:
    """Yield the changes of operators that have the same place in equal layers."""
    yield LayerChange(LayerChangeKind.WITHOUT, operators)
    one = table.graph.operators[operators[0]]
    for place in range(len(one.writes)):
        for option in (False, True):
            if one.recomputable:
                yield LayerChange(LayerChangeKind.AGAIN, operators, place, option)
            yield LayerChange(LayerChangeKind.TOGGLE, operators, place, option)
    for place in range(len(table.others[table.number[operators[0], None]])):
        yield LayerChange(LayerChangeKind.VARIANT, operators, place)
