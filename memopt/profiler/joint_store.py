"""Joint graphs on disk, by key: one SQLite file, safe for several processes at once.

What is kept is read by Python's pickle, which runs what it is told to. So the file and its folder
are the user's alone: where others own them or may write there, nothing is read or written.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

from memopt.models.folders import default_directory, tell_once

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS graphs "
    "(place INTEGER PRIMARY KEY, key TEXT UNIQUE, checksum TEXT NOT NULL, graph BLOB NOT NULL)"
)
_VERSION = 1
_WHAT = "joint graphs in"
MOST_GRAPHS = 200
LARGEST_GRAPH_BYTES = 8 * 2**20
"""Of 48 layers a graph takes 0.5 MiB."""


class JointStore:
    """Graphs as bytes. An unreadable file is treated as empty.

    Args:
        folder: where; None: MEMOPT_CACHE_DIR or the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def _connect(self) -> sqlite3.Connection:
        folder = (self._folder or default_directory()) / f"graphs-v{_VERSION}"
        # A journal beside the file is as good as the file: the folder must be the user's, too.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_own(folder)
        path = folder / "graphs.sqlite"
        # Made here, since SQLite would let the user's group write it where the umask does.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        _check_own(path)
        connection = sqlite3.connect(path, timeout=30.0)
        connection.execute(_SCHEMA)
        return connection

    def load(self, key: str) -> bytes | None:
        """The graph of a key; None if there is none, or it is damaged."""
        try:
            with closing(self._connect()) as connection:
                row = connection.execute(
                    "SELECT checksum, graph FROM graphs WHERE key = ?", (key,)
                ).fetchone()
        except (sqlite3.DatabaseError, OSError, RuntimeError) as error:
            self._tell("read", error)
            return None
        if row is None or not isinstance(row[1], bytes) or row[0] != _checksum(row[1]):
            return None
        graph: bytes = row[1]
        return graph

    def store(self, key: str, graph: bytes) -> None:
        """Keep a graph, and of all graphs those that were stored last."""
        if len(graph) > LARGEST_GRAPH_BYTES:
            return
        row = (key, _checksum(graph), graph)
        try:
            with closing(self._connect()) as connection, connection:
                connection.execute(
                    "INSERT OR REPLACE INTO graphs (key, checksum, graph) VALUES (?, ?, ?)", row
                )
                connection.execute(
                    "DELETE FROM graphs WHERE place <= (SELECT MAX(place) FROM graphs) - ?",
                    (MOST_GRAPHS,),
                )
        except (sqlite3.DatabaseError, OSError, RuntimeError) as error:
            self._tell("written", error)

    def _tell(self, doing: str, error: Exception) -> None:
        # RuntimeError: there is no home folder.
        tell_once(_WHAT, self._folder or Path("memopt's folder"), doing, error)


def _check_own(path: Path) -> None:
    """Refuse a file or folder that others than the user may change."""
    if not hasattr(os, "getuid"):
        return
    found = os.lstat(path)
    shared = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid != os.getuid() or shared or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"others than you may write {path}: delete it, or chmod go-w")


def _checksum(graph: bytes) -> str:
    return hashlib.sha256(graph).hexdigest()
