"""`memopt doctor`: what a bug report needs, and an exit status that says whether memopt works."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import numpy
import pytest
import torch

from memopt.commands.output import ExitCode
from memopt.torch_private.rows import ROWS
from tests.cli.commands import run, run_json
from tests.torch_private.hiding import hide


def test_each_row_is_printed() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert result.stdout.count("CaptureError") == sum(row.required for row in ROWS)
    assert f"{len(ROWS)} names of torch: " in result.stdout
    assert "missing" not in result.stdout


def test_what_a_bug_report_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = tmp_path / "caches"
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(caches))
    (caches / "costs").mkdir(parents=True)
    (caches / "costs" / "a.json").write_bytes(bytes(2048))
    found = run_json("doctor")
    facts = found["facts"]
    assert found["works"]
    assert facts["torch"] == importlib.metadata.version("torch")
    assert facts["numpy"] == numpy.__version__
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert facts["caches"] == f"{caches}: 1 files, 2.0 KiB"
    assert facts["MEMOPT_CACHE_DIR"] == str(caches)
    assert f"{torch.accelerator.device_count()} devices" in facts["accelerator"]
    assert {"memopt", "platform", "numba", "ortools", "processors", "cpu"} <= facts.keys()
    assert [one["name"] for one in found["names"]] == [row.name for row in ROWS]
    assert all(one["purpose"] and one["versions"] for one in found["names"])


def test_a_name_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch._mirror_autograd_meta_to"
    hide(monkeypatch, name)
    result = run("doctor")
    assert result.exit_code == ExitCode.FAILED
    assert f"memopt does not work without {name}" in result.stdout
    found = run_json("doctor", code=ExitCode.FAILED)
    assert not found["works"]
    assert {one["name"]: one["state"] for one in found["names"]}[name] == "missing"


def test_a_name_that_memopt_can_miss_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch._dynamo.variables.builder._clone_input"
    hide(monkeypatch, name)
    result = run("doctor")
    assert result.exit_code == 0
    assert "1 missing" in result.stdout
