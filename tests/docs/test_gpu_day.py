"""What waits for a GPU: every test of it is found and has a twin without one; the script's dry run
has every cell."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import BENCHMARK
from benchmarks.gpu.cells import CELLS
from benchmarks.gpu.subject import Row
from benchmarks.runner import run
from tests.conftest import SLOW

ROOT = Path(__file__).parent.parent.parent

LISTING = """
import json, sys
import pytest

class Lister:
    def pytest_collection_finish(self, session):
        rows = []
        for item in session.items:
            mark = item.get_closest_marker("gpu")
            rows.append([item.nodeid, None if mark is None else mark.kwargs.get("twin", "")])
        print("ROWS" + json.dumps(rows))

only = ["--collect-only", "-qq", "-m", "not slow"]
sys.exit(pytest.main([*only, *sys.argv[1:]], plugins=[Lister()]))
"""


def files_with_gpu_tests() -> list[str]:
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(p) for p in found if "mark.gpu" in p.read_text(encoding="utf-8"))


def is_gpu(node: ast.expr) -> bool:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node) == "pytest.mark.gpu"


def test_every_gpu_test_says_its_twin() -> None:
    """The same test for the CPU in a list of devices, or another of its file without a GPU."""
    marks = 0
    for name in files_with_gpu_tests():
        if name == __file__:
            continue
        tree = ast.parse(Path(name).read_text(encoding="utf-8"))
        tests = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for test in tests.values():
            for mark in filter(is_gpu, test.decorator_list):
                assert isinstance(mark, ast.Call), f"{name}: {test.name} has no twin"
                (twin,) = (ast.literal_eval(word.value) for word in mark.keywords)
                kept = ast.unparse(ast.Module(list(tests[twin].decorator_list), []))
                assert "gpu" not in kept
                assert "slow" not in kept
                assert f"{Path(name).relative_to(ROOT)}::{twin}" not in SLOW
                marks += 1
        for devices in (node for node in ast.walk(tree) if isinstance(node, ast.List)):
            texts = [ast.unparse(item) for item in devices.elts]
            if any("mark.gpu" in text for text in texts):
                assert "'cpu'" in texts, f"{name}: {texts}"
                listed = [x for x in SLOW if x.startswith(str(Path(name).relative_to(ROOT)))]
                assert not [x for x in listed if re.search(r"\bcpu\b", x)]
                marks += 1
    assert marks >= 3


@pytest.mark.slow
def test_every_gpu_test_is_found_and_has_a_twin_in_the_fast_suite() -> None:
    files = [name for name in files_with_gpu_tests() if name != __file__]
    assert len(files) >= 3
    command = [sys.executable, "-c", LISTING, *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (x for x in listed.splitlines() if x.startswith("ROWS"))
    tests = dict(json.loads(line.removeprefix("ROWS")))
    gpu = {name: twin for name, twin in tests.items() if twin is not None}
    assert {name.partition("::")[0] for name in gpu} == {
        str(Path(name).relative_to(ROOT)) for name in files
    }
    for name, twin in gpu.items():
        file, _, test = name.partition("::")
        other = f"{file}::{twin or test.replace('cuda', 'cpu')}"
        assert other != name
        assert other in tests, f"{name}: no twin {other}"
        assert tests[other] is None


def test_the_table_of_the_day() -> None:
    rows = [Row("families", "mlp", "peak MiB", "1.0", "1.0", "ok")]
    made = BENCHMARK.made(rows, Namespace(device="cpu", size="tiny"))["results"].splitlines()
    assert made[0].endswith("the CPU, tiny")
    assert made[-1] == "| families | mlp | peak MiB | 1.0 | 1.0 | ok |"
    kinds = {name.rpartition(" ")[0] or name for name in CELLS}
    wanted = ("families", "snapshots", "calibration", "CUDA graphs", "joint", "peers")
    for kind in (*wanted, "compiled kernels", "offloading"):
        assert any(name.startswith(kind) for name in kinds | set(CELLS)), kind


def test_without_a_gpu_it_says_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device here; say --device cpu --size tiny"):
        run("gpu", ["--resume", str(tmp_path / "results.json")])


def test_when_the_time_is_up_cells_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--size", "tiny", "--minutes", "0", "--only", "calibration"]
    assert run("gpu", [*words, "--resume", str(tmp_path / "results.json")]) == 1
    assert "calibration: the time is up" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dry_run(tmp_path: Path) -> None:
    """Every cell on the CPU, within ten minutes, and again from its results at once."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--size", "tiny"]
    command += ["--rounds", "1", "--resume", str(tmp_path / "results.json")]
    for limit_s in (600, 60):
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        assert ran.returncode == 0, ran.stderr
        assert json.loads((tmp_path / "results.json").read_text())["rows"].keys() == CELLS.keys()
        assert "| no |" not in ran.stdout
