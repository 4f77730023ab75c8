"""A store of plans on disk by key, so that another process need not solve again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock, Timeout

from memopt.errors import PlanFileError
from memopt.files.plan_file import load, save
from memopt.models.folders import default_directory, drop_oldest, tell_once
from memopt.plan_record import STOPPED, PlanRecord

MOST_FILES = 500
_PATIENCE_S = 3600.0
_WHAT = "plans in"


class PlanStore:
    """A folder of plan files. Of processes that want the same plan at once, one solves.

    Args:
        folder: its path; None: MEMOPT_CACHE_DIR or the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or default_directory()) / "plans-v1"

    def get(
        self,
        key: str,
        make: Callable[[], PlanRecord],
        fits: Callable[[PlanRecord], bool] = lambda _: True,
    ) -> tuple[PlanRecord, bool]:
        """Return a key's plan, and whether it was read from disk; else make and store it.

        Args:
            key: names the plan.
            make: makes the plan.
            fits: whether a stored plan answers the request; if not, a new one replaces it.
        """
        path = self._path(key)
        with ExitStack() as stack:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(f"{path}.lock", timeout=_PATIENCE_S))
            except (OSError, Timeout) as error:
                tell_once(_WHAT, self._folder, "locked", error)
            found = self._found(path)
            if found is not None and fits(found):
                return found, True
            return self._kept(path, make()), False

    def find(self, key: str) -> PlanRecord | None:
        """Return a key's plan; None: there is none that can be read."""
        return self._found(self._path(key))

    def renew(self, key: str, make: Callable[[], PlanRecord]) -> PlanRecord:
        """Make a key's plan anew, and replace the stored one."""
        return self._kept(self._path(key), make())

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    @staticmethod
    def _found(path: Path) -> PlanRecord | None:
        try:
            return load(path) if path.exists() else None
        except (OSError, PlanFileError):
            # An unreadable or damaged plan is made anew.
            return None

    def _kept(self, path: Path, made: PlanRecord) -> PlanRecord:
        if STOPPED in made.notes:
            return made
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save(made, path)
            drop_oldest(self._folder, MOST_FILES)
        except PlanFileError:
            # The example call has a value that a file cannot hold: only this process uses the plan.
            pass
        except OSError as error:
            tell_once(_WHAT, self._folder, "written", error)
        return made


@functools.cache
def code_digest() -> str:
    """Return a digest of memopt's Python files: another version's solvers make other plans."""
    root = Path(__file__).parent.parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
