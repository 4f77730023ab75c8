"""Joint graphs on disk, by key: one SQLite file, safe for several processes at once.

What is kept is read by Python's pickle, which runs what it is told to. So the file is the user's
alone: one that others own or may write is neither read nor written.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path

from memopt.models.folders import default_directory, tell_once

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS graphs "
    "(key TEXT PRIMARY KEY, used REAL NOT NULL, checksum TEXT NOT NULL, graph BLOB NOT NULL)"
)
_VERSION = 1
_WHAT = "joint graphs in"
MOST_GRAPHS = 200


class JointStore:
    """Graphs as bytes. An unreadable file is treated as empty.

    Args:
        folder: where; None: MEMOPT_CACHE_DIR or the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or default_directory()) / f"graphs-v{_VERSION}.sqlite"

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Made here, since SQLite would let the user's group write it where the umask does.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        found = os.stat(self._path)
        if hasattr(os, "getuid"):
            shared = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
            if found.st_uid != os.getuid() or shared:
                raise PermissionError("others than you may write it: delete it, or chmod 600")
        connection = sqlite3.connect(self._path, timeout=30.0)
        connection.execute(_SCHEMA)
        return connection

    def load(self, key: str) -> bytes | None:
        """The graph of a key; None if there is none, or it is damaged."""
        try:
            with closing(self._connect()) as connection, connection:
                row = connection.execute(
                    "SELECT checksum, graph FROM graphs WHERE key = ?", (key,)
                ).fetchone()
                if row is None or not isinstance(row[1], bytes) or row[0] != _checksum(row[1]):
                    return None
                connection.execute("UPDATE graphs SET used = ? WHERE key = ?", (time.time(), key))
                graph: bytes = row[1]
                return graph
        except (sqlite3.DatabaseError, OSError) as error:
            tell_once(_WHAT, self._path, "read", error)
            return None

    def store(self, key: str, graph: bytes) -> None:
        """Keep a graph, and of all graphs those that were used last."""
        row = (key, time.time(), _checksum(graph), graph)
        try:
            with closing(self._connect()) as connection, connection:
                connection.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?, ?, ?)", row)
                connection.execute(
                    "DELETE FROM graphs WHERE key NOT IN "
                    "(SELECT key FROM graphs ORDER BY used DESC LIMIT ?)",
                    (MOST_GRAPHS,),
                )
        except (sqlite3.DatabaseError, OSError) as error:
            tell_once(_WHAT, self._path, "written", error)


def _checksum(graph: bytes) -> str:
    return hashlib.sha256(graph).hexdigest()
