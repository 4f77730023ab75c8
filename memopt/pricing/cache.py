"""The profile cache on disk: one SQLite file, safe for several processes at once."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from memopt.errors import PlanFileError
from memopt.models import codec
from memopt.models.codec import Check
from memopt.models.folders import default_directory, tell_once
from memopt.models.reader import Reader, parse

_SCHEMA = "CREATE TABLE IF NOT EXISTS costs (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_VERSION = 5
_LARGEST_ROW = 2**20

_Bytes: TypeAlias = Annotated[int, Check("the bytes of a call", lambda size: 0 <= size <= 2**53)]
_Seconds: TypeAlias = Annotated[float, Check("the time of a call", lambda time: 0 <= time <= 1e6)]


@dataclass(frozen=True)
class Cost:
    """The measured or estimated cost of one kernel call.

    Attributes:
        time_s: median seconds.
        workspace_bytes: peak during the call minus its outputs.
        output_bytes: bytes of each storage made for the results, in their order.
    """

    time_s: _Seconds
    workspace_bytes: _Bytes
    output_bytes: tuple[_Bytes, ...]


class ProfileCache:
    """Costs by (environment, signature). An unreadable file is treated as empty."""

    def __init__(self, directory: Path | None = None) -> None:
        self._path = (directory or default_directory()) / f"profile-v{_VERSION}.sqlite"

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=30.0)
        connection.execute(_SCHEMA)
        return connection

    def load(self, keys: list[str]) -> dict[str, Cost]:
        """Return the known costs among `keys`; a row that holds no valid cost counts as unknown."""
        found: dict[str, Cost] = {}
        try:
            with closing(self._connect()) as connection:
                # Bytes, since a damaged row may hold no text at all.
                connection.text_factory = bytes
                for key in keys:
                    row = connection.execute(
                        "SELECT value FROM costs WHERE key = ?", (key,)
                    ).fetchone()
                    cost = _read_cost(row[0]) if row is not None else None
                    if cost is not None:
                        found[key] = cost
        except (sqlite3.DatabaseError, OSError) as error:
            tell_once("profile cache", self._path, "read", error)
        return found

    def store(self, costs: dict[str, Cost]) -> None:
        """Add costs. A row that another process stored meanwhile is replaced as a whole."""
        rows = [(key, json.dumps(asdict(cost))) for key, cost in costs.items()]
        try:
            with closing(self._connect()) as connection, connection:
                connection.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?)", rows)
        except (sqlite3.DatabaseError, OSError) as error:
            tell_once("profile cache", self._path, "written", error)


def _read_cost(stored: object) -> Cost | None:
    """Read the cost in a row; None if it holds none, or figures that no call can have."""
    if not isinstance(stored, bytes) or len(stored) > _LARGEST_ROW:
        return None
    try:
        return codec.read(Cost, Reader(parse(stored), "cost"))
    except PlanFileError:
        return None
