"""Placement instances in minimalloc's CSV format: id, lower, upper, size[, alignment][, offset]."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from memopt.models.folders import write_whole
from memopt.passes.place.buffers import Buffer

REQUIRED = ("id", "lower", "upper", "size")


def read_buffers(path: str | Path) -> tuple[tuple[Buffer, ...], dict[str, int] | None]:
    """Read an instance: its buffers, and their offsets if the file has a column for them.

    Raises:
        ValueError: a column is missing or a value is not a whole number; names the line.
        OSError: the file cannot be read.
    """
    buffers: list[Buffer] = []
    offsets: dict[str, int] = {}
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = csv.DictReader(file)
        columns = [name.strip() for name in rows.fieldnames or ()]
        rows.fieldnames = columns
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise ValueError(
                f"{path}: there is no column {missing[0]!r}; its first line must name the columns "
                f"{', '.join(REQUIRED)}, with commas between them"
            )
        for row in rows:
            try:
                if empty := [name for name in REQUIRED if row[name] is None]:
                    raise ValueError(f"there is no {empty[0]}")
                buffers.append(
                    Buffer(
                        row["id"],
                        int(row["lower"]),
                        int(row["upper"]),
                        int(row["size"]),
                        int(row.get("alignment") or 1),
                    )
                )
                if "offset" in columns:
                    offsets[row["id"]] = int(row["offset"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {rows.line_num}: {error}") from None
    return tuple(buffers), offsets if "offset" in columns else None


def write_buffers(
    path: str | Path, buffers: Iterable[Buffer], offsets: Mapping[str, int] | None = None
) -> None:
    """Write an instance, with a column of offsets if given. The column of alignments is written
    only where some buffer has one."""
    listed = tuple(buffers)
    columns = [*REQUIRED]
    if any(buffer.alignment > 1 for buffer in listed):
        columns.append("alignment")
    if offsets is not None:
        columns.append("offset")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for buffer in listed:
        writer.writerow({**asdict(buffer), "offset": (offsets or {}).get(buffer.id)})
    write_whole(path, text.getvalue().encode())
