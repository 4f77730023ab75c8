"""The command line: what it prints, writes and returns, in 80 columns and in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.commands.output import ExitCode
from memopt.commands.targets import not_built
from memopt.models.codec import read
from memopt.models.reader import Reader
from tests.cli.commands import GPT2, ROOT, run, run_json
from tests.zoo import get


def test_plan_saves_draws_and_shows() -> None:
    result = run("plan", "mymodels:make", "--budget", "min", "--out", "p.json", "--plot", "p.png")
    assert result.exit_code == 0, result.output
    assert "wrote p.json" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    plan = memopt.load("p.json")
    shown = run("show", "p.json", "--plot", "t.svg", "--kind", "timeline")
    assert shown.exit_code == 0
    assert shown.stdout == plan.summary() + "\nwrote t.svg: the timeline of the plan\n"
    assert "<svg" in Path("t.svg").read_text()
    figures = run_json("show", "p.json")
    assert figures["peak_bytes"] == plan.peak_bytes <= figures["budget_bytes"]
    assert figures["recomputations"] > 0


def test_show_traces_a_saved_plan() -> None:
    """The predicted step alone, and with the model a measured one beside it."""
    offload = ("--strategy", "offload-graph", "--device", "cpu-core", "--mode", "measure")
    saved = run("plan", "mymodels:make", "--budget", "min", "--out", "p.json", "-q", *offload)
    assert saved.exit_code == 0, saved.output
    shown = run("show", "p.json", "--trace", "t.json")
    assert shown.exit_code == 0
    assert "\nwrote t.json: the predicted step; open it at ui.perfetto.dev" in shown.stdout
    predicted = json.loads(Path("t.json").read_text())["traceEvents"]
    assert _processes(predicted) == {"predicted"}
    assert {e["cat"] for e in predicted if e["ph"] == "X"} >= {"compute", "to host", "from host"}
    end_us = max(e["ts"] + e["dur"] for e in predicted if e["ph"] == "X")
    assert end_us == pytest.approx(1e6 * memopt.load("p.json").step_time_s)
    beside = run_json("show", "p.json", "--trace", "t.json", "--measure", "mymodels:make")
    assert beside["host_peak_bytes"] > 0
    both = json.loads(Path("t.json").read_text())["traceEvents"]
    assert _processes(both) == {"predicted", "measured"}
    assert [e for e in both if e["pid"] == 1] == predicted
    measured = ("--trace", "t.json", "--measure")
    assert (
        "predicted step and a measured one"
        in run("show", "p.json", *measured, "mymodels:make").stdout
    )
    for arguments, part, code in (
        (("--measure", "mymodels:make"), "--trace FILE.json", ExitCode.USAGE),
        (("--trace", "none/t.json"), "--trace: cannot write", ExitCode.USAGE),
        (("--plot", "p.nix"), "its name must end in", ExitCode.USAGE),
        (("--plot", "p.png", "--kind", "nosuch"), "are memory, schedule, timeline", ExitCode.USAGE),
        ((*measured, "mymodels:other"), "has no 'other'", ExitCode.FAILED),
        ((*measured, "mymodels:make", "--dtype", "int4"), "--dtype: there is no", ExitCode.USAGE),
    ):
        wrong = run("show", "p.json", *arguments)
        assert wrong.exit_code == code
        assert part in " ".join(wrong.stderr.split())
        assert wrong.stdout == ""


def _processes(events: list[dict[str, Any]]) -> set[str]:
    return {e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_plan_for_machines() -> None:
    figures = run_json("plan", "mymodels.py:Namespace.make", "--strategy", "store-all")
    assert figures["strategy"] == "store-all"
    assert figures["budget_bytes"] is None
    assert figures["baseline"]["measured"]


def test_fits_on_a_device_and_on_many() -> None:
    estimate = ("fits", "mymodels:two", "--mode", "estimate", "--device", "cpu-core")
    chosen = (*estimate, "--budget", "40KiB", "--strategy", "store-all")
    alone = run_json(*chosen)
    assert [(row["strategy"], row["fits"]) for row in alone["rows"]] == [("store-all", False)]
    shared = run_json(*chosen, "--ranks", "4")
    assert "Each of 4 ranks (4 data)." in shared["notes"]
    # Of five layers of 24 x 24 and of their gradients, a rank has a quarter.
    parameter_bytes = 5 * 25 * 24 * 4
    sums = [sum(one["standing_bytes"].values()) for one in (alone, shared)]
    assert sums[0] - sums[1] == 2 * parameter_bytes * 3 // 4
    wrong = run("fits", "mymodels:two", "--ranks", "4")
    assert wrong.exit_code == ExitCode.USAGE
    assert "--ranks: asks about a cluster that is not there" in " ".join(wrong.stderr.split())


def test_fits_estimates_for_a_device_and_says_where_it_measured() -> None:
    one = ("fits", "mymodels:two", "--budget", "1GiB", "--strategy", "store-all")
    for_device = (*one, "--device", "cpu-core")
    estimated = run_json(*for_device)
    assert estimated == run_json(*for_device, "--mode", "estimate")
    (note,) = run_json(*for_device, "--mode", "measure")["notes"]
    assert note.startswith("Times and bytes were measured on this machine's cpu; of cpu-core")
    assert run(*one).exit_code == 0


def test_quiet_prints_nothing() -> None:
    result = run("plan", "mymodels:two", "--quiet", "--out", "p.json", "--budget", "0.9")
    assert result.exit_code == 0
    assert result.output == ""
    assert memopt.load("p.json").budget is not None


def test_budget_too_small() -> None:
    result = run("plan", "mymodels:make", "--budget", "1KiB")
    assert result.exit_code == ExitCode.INFEASIBLE
    assert "smallest feasible budget" in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert max(map(len, result.stderr.splitlines())) <= 80
    error = run_json("plan", "mymodels:make", "--budget", "1024", code=ExitCode.INFEASIBLE)["error"]
    assert error["type"] == "InfeasibleBudgetError"
    again = run("plan", "mymodels:make", "-q", "--budget", str(error["smallest_budget_bytes"]))
    assert again.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("nosuch:make",), ["no module 'nosuch'", "FILE.py:FACTORY"]),
        (("broken:make",), ["importing broken fails", "nosuchpackage"]),
        (("nosuch.py:make",), ["no file nosuch.py"]),
        (("mymodels:nosuch",), ["has no 'nosuch'"]),
        (("mymodels:number",), ["not a function"]),
        (("mymodels",), ["names no model", "MODULE:FACTORY"]),
        (("mymodels:fails",), ["mymodels:fails() fails", "KeyError", "mymodels.py, line 15"]),
        (("mymodels:alone",), ["returned Linear", "(model, inputs)"]),
        (("mymodels:misfit",), ["inputs do not fit the model", "cannot be multiplied"]),
        (("mymodels:selecting",), ["a shape depends on the values", "mymodels.py:29"]),
        (("hf:none.json",), ["cannot read none.json"]),
        (("hf:mymodels.py",), ["is no JSON"]),
    ],
)
def test_failures_say_what_to_do(arguments: tuple[str, ...], parts: list[str]) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == ExitCode.FAILED, result.output
    assert result.stderr.startswith("error: ")
    said = " ".join(result.stderr.split())
    for part in parts:
        assert part in said, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("mymodels:make", "--strategy", "nosuch"),
            ["--strategy: ", "unknown strategy 'nosuch'", "rotor"],
        ),
        (
            ("mymodels:make", "--budget", "much"),
            ["--budget: ", "cannot read the budget 'much'", "6GiB"],
        ),
        (
            ("mymodels:make", "--strategy", "dynprog", "--host-budget", "much"),
            ["--host-budget: ", "host_budget: ", "'much'"],
        ),
        (("mymodels:make", "--out", "none/p.json"), ["--out: ", "no folder"]),
        (("mymodels:make", "--out", "."), ["--out: ", "it is a folder"]),
        (("mymodels:make", "--out", "p.svg", "--plot", "./p.svg"), ["--plot: ", "--out writes"]),
        (("mymodels:make", "--lora", "r=99999999"), ["--lora: ", "no rank"]),
        (("mymodels:make", "--device", "H100", "--ranks", "99999999"), ["--ranks: ", "more than"]),
        (("mymodels:make", "--plot", "p.nix"), ["--plot: ", "p.nix: its name must end in", "png"]),
        (("mymodels:make", "--device", "Z80"), ["--device: ", "unknown device 'Z80'", "H100"]),
        (("mymodels:make", "--mode", "guess"), ["--mode: ", "measure", "estimate"]),
        (("mymodels:make", "--mode", "estimate"), ["--device: ", "H100"]),
        (("mymodels:make", "--optimizer", "nosuch"), ["--optimizer: ", "adamw"]),
        (("mymodels:make", "--batch", "7"), ["--batch, --sequence: a factory chooses its own"]),
        (("mymodels:make", "--dtype", "int4"), ["--dtype: ", "bfloat16"]),
        (("mymodels:make", "--returns", "logits"), ["--returns: ", "'logits'"]),
    ],
)
def test_wrong_values_of_options(arguments: tuple[str, ...], parts: list[str]) -> None:
    """They are wrong usage, as unknown options are, and found before the model is made."""
    for command in ("plan", "plan --json"):
        result = run(*command.split(), *arguments)
        assert result.exit_code == ExitCode.USAGE, result.output
        said = " ".join((result.stderr or json.loads(result.stdout)["error"]["message"]).split())
        for part in parts:
            assert part in said, said
        assert "Traceback" not in said


def test_wrong_usage() -> None:
    assert run("plan").exit_code == ExitCode.USAGE
    assert run("plan", "mymodels:make", "--nosuch").exit_code == ExitCode.USAGE
    assert run("nosuch").exit_code == ExitCode.USAGE


def test_damaged_plan_file() -> None:
    Path("p.json").write_text("{}")
    result = run("show", "p.json")
    assert result.exit_code == ExitCode.PLAN_FILE
    assert "not a memopt plan file" in result.stderr
    assert run_json("show", "p.json", code=ExitCode.PLAN_FILE)["error"]["type"] == "PlanFileError"


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run("plan", "mymodels:make", "--plot", "p.png")
    assert result.exit_code == ExitCode.FAILED
    assert "pip install matplotlib" in result.stderr


def test_hugging_face_config() -> None:
    get("gpt2")  # imports torchvision's stand-in, without which transformers fails here
    arguments = ("hf:gpt2.json", "--batch", "2", "--sequence", "12")
    figures = run_json("plan", *arguments, "--budget", "min")
    assert figures["model"].endswith("GPT2LMHeadModel")
    assert figures["peak_bytes"] < figures["baseline"]["peak_bytes"]
    assert figures["notes"] == []  # the logits beside the loss get no gradient
    profile = run_json("profile", *arguments)
    assert profile["step_time_s"] > 0


@pytest.mark.slow
def test_outputs_that_the_loss_does_not_read() -> None:
    get("gpt2")
    arguments = ("hf:gpt2.json", "--batch", "2", "--sequence", "12", "--budget", "min")
    # Rotor's smallest budget is no search's, which on a busy machine ends earlier.
    arguments = (*arguments, "--strategy", "rotor")
    peaks = [
        run_json("plan", *arguments, "--returns", returns)["peak_bytes"]
        for returns in ("loss", "all")
    ]
    assert peaks[0] < peaks[1]


def test_torchvision_that_cannot_be_imported() -> None:
    """As beside a torch of another build: transformers alone would fail to import any model."""
    Path("torchvision").mkdir()
    Path("torchvision/__init__.py").write_text("raise RuntimeError('operator nms is missing')")
    arguments = ("hf:gpt2.json", "--batch", "1", "--sequence", "4", "--mode", "estimate")
    command = [sys.executable, "-m", "memopt.cli", "plan", *arguments, "--device", "cpu-core"]
    paths = os.pathsep.join([str(Path.cwd()), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("strategy       Auto")


def test_what_hides_behind_a_failed_import() -> None:
    error = ImportError("Could not import module 'X'")
    error.__cause__ = RuntimeError("operator nms is missing")
    text = not_built(Path("c.json"), error, "operator nms is missing")
    assert "The cause: RuntimeError: operator nms is missing" in text
    assert "pip uninstall torchvision" in text


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("vit", "ViTForImageClassification"),
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForTokenClassification"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_hugging_face_heads(kind: str, head: str) -> None:
    get("gpt2")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    fields = {**sizes, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "decoder_start_token_id": 0}
    config = {"model_type": kind, "architectures": [head], "vocab_size": 61, **fields, **t5}
    Path("other.json").write_text(json.dumps(config))
    estimate = ("--mode", "estimate", "--device", "cpu-core")
    figures = run_json("plan", "hf:other.json", "--batch", "2", "--sequence", "8", *estimate)
    assert figures["model"].endswith(head)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "nosuch"}, "model_type is 'nosuch'"),
        ({"model_type": None}, "model_type is None"),
        ({"n_embd": "wide"}, "cannot build this model"),
        ({"architectures": ["GPT2Model"]}, "computes no loss"),
    ],
)
def test_wrong_hugging_face_config(change: dict[str, Any], part: str) -> None:
    get("gpt2")
    Path("gpt2.json").write_text(json.dumps({**GPT2, **change}))
    result = run("plan", "hf:gpt2.json", "--batch", "2")
    assert result.exit_code == ExitCode.FAILED, result.output
    assert part in " ".join(result.stderr.split())


def test_profile() -> None:
    result = run("profile", "mymodels:make", "--top", "20", "--out", "g.json")
    assert result.exit_code == 0, result.output
    assert "aten.addmm.default" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    graph = read(memopt.Graph, Reader(json.loads(Path("g.json").read_bytes())["value"], "graph"))
    figures = run_json("profile", "mymodels:make", "--top", "1")
    assert figures["operators"] == len(graph.operators)
    assert len(figures["kernels"]) == 1


def test_strategies() -> None:
    assert run_json("strategies") == memopt.strategies()
    result = run("strategies")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert all(name in result.stdout for name in memopt.strategies())


def test_devices() -> None:
    result = run("device")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "H100" in result.stdout
    assert any("H100" in figures["name"] for figures in run_json("device"))
    assert run_json("device", "h100")["block_bytes"] == 512
    assert "capacity_bytes" in run("device", "A100").stdout
    unknown = run("device", "Z80")
    assert unknown.exit_code == ExitCode.USAGE
    assert "unknown device 'Z80'" in unknown.stderr


def test_place() -> None:
    Path("buffers.csv").write_text("id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\n")
    figures = run_json("place", "buffers.csv", "--out", "placed.csv")
    assert (figures["peak_bytes"], figures["status"]) == (8, "optimal")
    assert "offset" in Path("placed.csv").read_text()
    assert "peak 8 bytes" in run("place", "buffers.csv").stdout
    assert run("place", "buffers.csv", "--capacity", "8").exit_code == ExitCode.OK
    refused = run("place", "buffers.csv", "--capacity", "5", "--out", "refused.csv")
    assert refused.exit_code == ExitCode.INFEASIBLE
    assert "--capacity 8" in " ".join(refused.stderr.split())
    assert not Path("refused.csv").exists()
    itself = run("place", "buffers.csv", "--out", "./buffers.csv")
    assert itself.exit_code == ExitCode.USAGE
    assert "the file that is read" in " ".join(itself.stderr.split())
    for text, said in (
        ("id,lower,upper\na,0,3\n", "no column 'size'"),
        ("id,lower,upper,size\na,0,3\n", "line 2: there is no size"),
        (f"id,lower,upper,size\na,0,3,{2**70}\n", "must be below 2^62"),
        (f"id,lower,upper,size\na,0,{2**70},3\n", "must be below 2^62"),
    ):
        Path("buffers.csv").write_text(text)
        wrong = run("place", "buffers.csv")
        assert wrong.exit_code == ExitCode.FAILED
        assert said in " ".join(wrong.stderr.split())
    # As spreadsheets save it.
    Path("buffers.csv").write_text("id,lower,upper,size\na,0,3,4\n", encoding="utf-8-sig")
    assert run_json("place", "buffers.csv")["peak_bytes"] == 4


def test_version() -> None:
    assert run("version").stdout == f"{memopt.__version__}\n"


def test_in_a_pipe_and_in_a_file(tmp_path: Path) -> None:
    """As a real process with output to a file: plain text, no escape codes, no progress."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["COLUMNS"]
    with open("out.txt", "w", encoding="utf-8") as out:
        finished = subprocess.run(
            [sys.executable, "-m", "memopt.cli", "plan", "mymodels:make", "--budget", "min"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=120,
            check=False,
        )
    assert finished.returncode == 0, finished.stderr
    text = Path("out.txt").read_text(encoding="utf-8")
    assert text.startswith("strategy")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert finished.stderr == ""
