"""Finished rows of a long benchmark, kept in a JSON file so that a run cut short is taken up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from memopt.files.envelope import write_atomically


class _Row(Protocol):
    """A dataclass of plain values."""

    __dataclass_fields__: dict[str, Any]


RowT = TypeVar("RowT", bound=_Row)


class Kept(Generic[RowT]):
    """Rows by name, written after every `add`.

    Args:
        path: the file; its folder is made.
        row: the dataclass that a row is.
        settings: whatever must be alike for rows to stand in one table (plain JSON values).
        fresh: start anew even if the file has rows.

    Raises:
        SystemExit: the file's rows were measured with other settings.
    """

    def __init__(
        self, path: Path, row: type[RowT], settings: dict[str, Any], *, fresh: bool = False
    ) -> None:
        self.path, self.settings = path, settings
        self.shared: dict[str, Any] = {}
        self.rows: dict[str, list[RowT]] = {}
        if fresh or not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise SystemExit(
                f"{path} keeps rows measured with {found['settings']}, not {settings}; --fresh "
                "drops them, --resume FILE keeps this run's elsewhere"
            )
        self.shared = found["shared"]
        self.rows = {name: [row(**one) for one in many] for name, many in found["rows"].items()}

    def add(self, name: str, rows: list[RowT]) -> None:
        """Keep the finished rows of `name`."""
        self.rows[name] = rows
        self.write()

    def write(self) -> None:
        """Write everything kept so far, a name a line."""
        rows = ",\n".join(
            f"{json.dumps(name)}: {json.dumps([asdict(one) for one in many])}"
            for name, many in self.rows.items()
        )
        settings, shared = json.dumps(self.settings), json.dumps(self.shared, indent=1)
        text = f'{{"settings": {settings},\n"shared": {shared},\n"rows": {{\n{rows}\n}}}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, text.encode())

    def ordered(self, names: Iterable[str]) -> list[RowT]:
        """All kept rows, in the order of `names`."""
        return [row for name in names for row in self.rows.get(name, [])]

    def missing(self, names: Iterable[str], note: Callable[[str], object]) -> Iterator[str]:
        """The names that have no rows yet, one after another; `note` is told of the others."""
        for name in names:
            if name in self.rows:
                note(f"{name}: kept in {self.path}")
            else:
                yield name
