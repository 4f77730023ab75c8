"""Plans kept on disk by what they were made for, so that the next process need not solve again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from memopt.errors import PlanFileError
from memopt.files.plan_file import load, save
from memopt.models.folders import default_directory, drop_oldest
from memopt.plan_record import PlanRecord

MOST_FILES = 500
_PATIENCE_S = 3600.0


class PlanStore:
    """A folder of plan files. Processes that want the same plan at once wait for the first.

    Args:
        folder: where; None: MEMOPT_CACHE_DIR or the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or default_directory()) / "plans-v1"

    def get(self, key: str, make: Callable[[], PlanRecord]) -> tuple[PlanRecord, bool]:
        """The plan of a key, and whether it was there; else `make`'s, which is kept."""
        path = self._path(key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock", timeout=_PATIENCE_S):
                return self._found_or_made(path, make)
        except (OSError, Timeout):
            # The store is a convenience: a full or read-only disk must not stop a training.
            return make(), False

    def drop(self, key: str) -> None:
        """Forget a plan: it does not fit what is there now."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _found_or_made(self, path: Path, make: Callable[[], PlanRecord]) -> tuple[PlanRecord, bool]:
        if path.exists():
            try:
                return load(path), True
            except PlanFileError:
                path.unlink(missing_ok=True)
        made = make()
        try:
            save(made, path)
            drop_oldest(self._folder, MOST_FILES)
        except PlanFileError:
            # The call holds what a file cannot: this plan is for this process.
            pass
        return made, False
