"""Rows of chains, each a mapping from a Stage's fields to values: drawn at random, or read from a
table. `memopt.models.chain` makes stages of them."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, object]
Table: TypeAlias = str | PathLike[str] | Iterable[Mapping[str, object]] | Any
"""A CSV file's path, rows, or a data frame."""

REQUIRED = ("forward_time_s", "backward_time_s", "output_bytes")
"""The fields that have no default."""


class Shape(StrEnum):
    """The course of the sizes along a random chain."""

    HETEROGENEOUS = "heterogeneous"
    EQUAL = "equal"
    GROWING = "growing"
    SHRINKING = "shrinking"
    SPARSE = "sparse"
    """Heterogeneous with many zeros, in sizes and in times."""


def random_rows(
    rng: Random,
    length: int,
    shape: Shape | None,
    max_bytes: int,
    max_time_s: int,
    parameter_gradients: bool,
    negative_overheads: bool,
) -> tuple[int, int, list[Row]]:
    """Draw (bytes of the input, of its gradient, a row for each stage); see
    `memopt.models.chain.Chain.random`."""
    shape = rng.choice(list(Shape)) if shape is None else shape
    sizes = _sizes(rng, length + 1, shape, max_bytes)
    zeros = 0.4 if shape is Shape.SPARSE else 0.0
    rows: list[Row] = []
    for index in range(1, length + 1):
        output = sizes[index]
        saved = output + (0 if shape is Shape.EQUAL else _draw(rng, max_bytes, zeros))
        gradient = output if rng.random() < 0.8 else _draw(rng, max_bytes, zeros)
        low = -(gradient + saved) if negative_overheads else 0
        longest = 0 if index == length and rng.random() < 0.7 else max_time_s
        rows.append(
            {
                "forward_time_s": _draw(rng, longest, zeros),
                "backward_time_s": _draw(rng, longest, zeros),
                "output_bytes": output,
                "saved_bytes": saved,
                "gradient_bytes": gradient,
                "forward_overhead_bytes": _draw(rng, max_bytes // 3, zeros),
                "forward_no_save_overhead_bytes": rng.choice(
                    [None, _draw(rng, max_bytes // 2, zeros)]
                ),
                "backward_overhead_bytes": rng.randint(low, max_bytes),
                "parameter_gradient_bytes": (
                    _draw(rng, max_bytes, zeros) if parameter_gradients else 0
                ),
                "name": f"stage{index}",
            }
        )
    wanted = rng.random() < 0.5
    return sizes[0], sizes[0] if wanted else 0, rows


def _draw(rng: Random, high: int, zeros: float) -> int:
    """Draw 0 with probability `zeros`, else a whole number from 0 to `high`."""
    return 0 if rng.random() < zeros else rng.randint(0, high)


def _sizes(rng: Random, count: int, shape: Shape, max_bytes: int) -> list[int]:
    if shape is Shape.EQUAL:
        return [rng.randint(1, max_bytes)] * count
    sizes = [rng.randint(0, max_bytes) for _ in range(count)]
    if shape is Shape.SPARSE:
        return [0 if rng.random() < 0.4 else size for size in sizes]
    if shape is Shape.GROWING:
        return sorted(sizes)
    if shape is Shape.SHRINKING:
        return sorted(sizes, reverse=True)
    return sizes


def table_rows(table: Table, known: Collection[str]) -> list[Row]:
    """Read a table: one row for each stage, with a Stage's fields as columns; an empty entry, None
    or NaN leaves a field at its default.

    Raises:
        ValueError: a column is unknown or missing, or an entry is no number; names the row.
        OSError: the file cannot be read.
    """
    rows = []
    for number, given in enumerate(_rows(table), 1):
        where = f"Chain.from_table: row {number}"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: a mapping from columns to values is needed, got {given!r}")
        row = {str(key): value for key, value in given.items() if not _empty(value)}
        unknown = sorted(set(map(str, given)) - set(known))
        if unknown:
            raise ValueError(
                f"{where}: there is no field {unknown[0]!r}; the columns are {', '.join(known)}"
            )
        for name in REQUIRED:
            if name not in row:
                raise ValueError(f"{where}: {name} is missing")
        rows.append({name: _value(f"{where}: {name}", name, x) for name, x in row.items()})
    return rows


def _rows(table: Any) -> Iterable[Mapping[str, object]]:
    if isinstance(table, str | PathLike):
        with Path(table).open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, skipinitialspace=True)
    elif hasattr(table, "to_dict"):  # a data frame, without importing pandas
        yield from table.to_dict("records")
    elif isinstance(table, Iterable):
        yield from table
    else:
        kind = type(table).__name__
        raise ValueError(f"Chain.from_table: a CSV file, a data frame or rows are needed: {kind}")


def _empty(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    differs = value != value
    # NaN differs from itself; pandas' NA neither differs nor does not.
    return value is None or type(value).__name__ == "NAType" or bool(differs)


def _value(where: str, name: str, value: object) -> object:
    """Return an entry as the field's value: a column of a data frame with empty entries holds
    floats, a CSV file text."""
    if name == "name":
        return str(value)
    if isinstance(value, str):
        try:
            value = float(value) if name.endswith("_s") else _whole(value)
        except ValueError:
            raise ValueError(f"{where} is no number: {value!r}") from None
    if name.endswith("_bytes") and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _whole(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
