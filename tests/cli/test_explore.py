"""`memopt explore`: the page, the curve and the snapshot, of a model and of a saved plan."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path

from memopt.commands.output import ExitCode
from tests.cli.commands import run


def test_a_model_for_a_device_that_is_not_there() -> None:
    result = run(
        "explore", "mymodels:make", "--device", "H100", "--points", "3", "--out", "r.html",
        "--csv", "c.csv", "--snapshot", "s.pickle",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == "wrote r.html\nwrote c.csv\nwrote s.pickle\n"
    page = Path("r.html").read_text(encoding="utf-8")
    assert "H100" in page
    assert "are estimates for H100" in page
    rows = list(csv.DictReader(Path("c.csv").read_text().splitlines()))
    assert {row["strategy"] for row in rows} == {"auto", "store-all"}
    assert len(rows) == 6
    assert pickle.loads(Path("s.pickle").read_bytes())["segments"]


def test_a_saved_plan() -> None:
    saved = run("plan", "mymodels:two", "--budget", "min", "--out", "p.json", "-q")
    assert saved.exit_code == 0, saved.output
    shown = run("explore", "p.json", "--points", "2", "-q")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == ""
    assert Path("report.html").is_file()
    assert run("explore", "p.json", "--csv", "c.csv").exit_code == ExitCode.USAGE


def test_wrong_use() -> None:
    assert run("explore", "mymodels:make", "--strategy", "none").exit_code == ExitCode.USAGE
    assert run("explore", "mymodels:make", "--out", "no/r.html").exit_code == ExitCode.USAGE
    assert run("explore", "mymodels:make", "--points", "1").exit_code == ExitCode.USAGE
    twice = run("explore", "mymodels:make", "--out", "r.html", "--csv", "r.html")
    assert twice.exit_code == ExitCode.USAGE
    Path("damaged.json").write_text("{}")
    itself = run("explore", "damaged.json", "--out", "damaged.json")
    assert itself.exit_code == ExitCode.USAGE
    assert run("explore", "damaged.json").exit_code == ExitCode.PLAN_FILE
