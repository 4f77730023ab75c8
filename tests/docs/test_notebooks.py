"""The notebooks run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent.parent / "docs" / "notebooks"


def run(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Execute in a new kernel with no profile cached."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(folder))
    # The kernel starts in the notebooks' folder; what is tested is this tree.
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent.parent))
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    ).execute()


LONG = {"four-papers", "other-gpu", "offload-bandwidth", "olla-step", "three-models"}
"""Half a minute each on two cores; make test-all runs them."""
ALL = [
    pytest.param(name, marks=pytest.mark.slow) if name in LONG else name
    for name in sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALL)
def test_notebook(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(name, monkeypatch, tmp_path)
