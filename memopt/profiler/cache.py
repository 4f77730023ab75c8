"""The profile cache on disk: one SQLite file, safe for several processes at once."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from memopt.models.folders import default_directory

_SCHEMA = "CREATE TABLE IF NOT EXISTS costs (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_VERSION = 1


@dataclass(frozen=True)
class Cost:
    """What one kernel call costs.

    Attributes:
        time_s: median seconds.
        workspace_bytes: peak during the call minus its outputs.
        output_bytes: storage bytes of each tensor it returned, in order.
    """

    time_s: float
    workspace_bytes: int
    output_bytes: tuple[int, ...]


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
        """The known costs among `keys`."""
        found: dict[str, Cost] = {}
        try:
            with closing(self._connect()) as connection:
                for key in keys:
                    row = connection.execute(
                        "SELECT value FROM costs WHERE key = ?", (key,)
                    ).fetchone()
                    if row is not None:
                        value = json.loads(row[0])
                        found[key] = Cost(
                            float(value["time_s"]),
                            int(value["workspace_bytes"]),
                            tuple(int(b) for b in value["output_bytes"]),
                        )
        except (sqlite3.DatabaseError, ValueError, KeyError, OSError):
            return {}
        return found

    def store(self, costs: dict[str, Cost]) -> None:
        """Add costs; what another process stored meanwhile is replaced, never mixed."""
        rows = [(key, json.dumps(asdict(cost))) for key, cost in costs.items()]
        try:
            with closing(self._connect()) as connection, connection:
                connection.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?)", rows)
        except (sqlite3.DatabaseError, OSError):
            # The cache is a convenience: a full or read-only disk must not stop a plan.
            return
