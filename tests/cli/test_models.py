"""`memopt compare`, `memopt --version`, the dtype of a named model, and what factories do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memopt
from memopt.commands.output import ExitCode
from memopt.commands.targets import Sizes, load_target
from tests.cli.commands import GPT2, ROOT, run, run_json
from tests.zoo import get

ESTIMATE = ("--mode", "estimate", "--device", "cpu-core")


@pytest.mark.parametrize("module", ["memopt", "memopt.cli"])
def test_version_of_the_module(module: str) -> None:
    assert run("--version").stdout == f"{memopt.__version__}\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == f"{memopt.__version__}\n"


def test_compare() -> None:
    chosen = ("--budget", "min", "--budget", "0.9", "--strategy", "store-all", "-q")
    files = ("--out", "t.md", "--plot", "t.png")
    quiet = run("compare", "mymodels:make", *chosen, "--strategy", "rotor", *files)
    assert (quiet.exit_code, quiet.output) == (ExitCode.OK, "")
    assert "| rotor |" in Path("t.md").read_text(encoding="utf-8")
    assert Path("t.png").read_bytes().startswith(b"\x89PNG")
    shown = run("compare", "mymodels:make", "--budget", "min", "--strategy", "rotor", *files)
    assert "overhead" in shown.stdout
    assert shown.stdout.endswith("wrote t.md\nwrote t.png\n")


def test_compare_for_machines() -> None:
    chosen = ("--strategy", "rotor", "--strategy", "olla", "--budget", "1.0", "--budget", "1KiB")
    figures = run_json("compare", "mymodels:make", *chosen, "--run")
    cells = {(cell["strategy"], cell["budget_bytes"]): cell for cell in figures["cells"]}
    peak = figures["baseline"]["peak_bytes"]
    assert set(cells) == {(name, size) for name in ("rotor", "olla") for size in (peak, 1024)}
    assert cells["rotor", 1024]["status"] == "infeasible"
    assert cells["rotor", peak]["measured_peak_bytes"] <= peak
    assert figures["measured_baseline"]["measured"]
    assert figures["complete"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--budget", "0.5", "--budget", "much"), "--budget: "),
        (("--strategy", "rotor", "--strategy", "nosuch"), "--strategy: "),
        (("--dtype", "int4"), "--dtype: "),
        (("--out", "none/t.md"), "--out: "),
    ],
)
def test_wrong_values_for_compare(arguments: tuple[str, ...], option: str) -> None:
    result = run("compare", "mymodels:make", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert option in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("meta", [False, True])
def test_configured_dtype(field: str, meta: bool) -> None:
    """As `from_pretrained` loads it; a Llama in bfloat16 was planned in float32."""
    get("gpt2")
    Path("half.json").write_text(json.dumps({**GPT2, field: "bfloat16"}))
    for dtype, expected in ((None, "torch.bfloat16"), ("float32", "torch.float32")):
        target = load_target("hf:half.json", Sizes(2, 8, meta=meta, dtype=dtype))
        assert {str(p.dtype) for p in target.model.parameters()} == {expected}
    plain = load_target("hf:gpt2.json", Sizes(2, 8, meta=meta))
    assert {str(p.dtype) for p in plain.model.parameters()} == {"torch.float32"}


def test_dtype_halves_the_estimate() -> None:
    get("gpt2")
    Path("half.json").write_text(json.dumps({**GPT2, "dtype": "bfloat16"}))
    arguments = ("--batch", "2", "--sequence", "12", "--mode", "estimate", "--device", "H100")
    full, half, asked = (
        run_json("profile", name, *arguments, *more)["resident_bytes"]
        for name, more in (
            ("hf:gpt2.json", ()),
            ("hf:half.json", ()),
            ("hf:gpt2.json", ("--dtype", "bfloat16")),
        )
    )
    assert half == asked < full


def test_images_in_the_models_dtype() -> None:
    get("gpt2")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "dtype": "bfloat16"}
    head = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    Path("vit.json").write_text(json.dumps({**head, **sizes, **more}))
    figures = run_json("plan", "hf:vit.json", "--batch", "2", "--strategy", "store-all")
    assert figures["baseline"]["measured"]


def test_a_factorys_model_in_another_dtype() -> None:
    full, half = (
        run_json("plan", "mymodels:make", "--strategy", "store-all", *ESTIMATE, *more)["peak_bytes"]
        for more in ((), ("--dtype", "float64"))
    )
    assert half == pytest.approx(2 * full, rel=0.05)


def test_strategies_say_what_one_gets() -> None:
    for name, text in memopt.strategies().items():
        assert not any(word in text for word in ("Theorem", "§", "Algorithm", "|x", "ā", "_i")), (
            name
        )
        assert len(text) <= 100, name


def test_what_a_factory_prints_and_how_it_ends() -> None:
    """Standard output is the command's; a factory that ends the process has failed."""
    Path("noisy.py").write_text(
        "import sys\nimport mymodels\nprint('imported')\n"
        "def make():\n    print('made')\n    return mymodels.two()\n"
        "def leave():\n    sys.exit(0)\n"
    )
    assert run_json("plan", "noisy.py:make", "--strategy", "store-all")["status"]
    left = run("plan", "noisy.py:leave")
    assert left.exit_code == ExitCode.FAILED
    assert "leave() fails: SystemExit: 0" in " ".join(left.stderr.split())
