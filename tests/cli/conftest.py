"""Every test of the command line runs in a user's folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import GPT2, MODULE


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with their own code in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mymodels.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nosuchpackage\n")
    (tmp_path / "gpt2.json").write_text(json.dumps(GPT2))
    monkeypatch.delitem(sys.modules, "mymodels", raising=False)
