"""`memopt fits`: the ladder, and options that mean the same in every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.commands.options import rank_of
from memopt.commands.output import ExitCode
from memopt.models.options import StepOptions
from memopt.stages import profiled_for
from tests.cli.commands import GPT2, run, run_json
from tests.models.training_graphs import random_training_graph
from tests.zoo import get

CARD = ("--gpu", "RTX4090")


def test_the_ladder_for_machines() -> None:
    found = run_json("fits", "mymodels:make", *CARD, "--capacity", "2GiB", "--lora", "16")
    assert found["device"] == "RTX4090-24GB"
    assert found["budget_bytes"] == 2 * 2**30
    assert (found["fits"], found["lora"], found["optimizer"]) == (True, 16, "adamw")
    (first, *_) = found["rungs"]
    assert first["fits"]
    assert first["peak_bytes"] <= found["budget_bytes"]
    assert {"parameters", "activations", "gradients"} <= set(found["parts_bytes"])


def test_the_largest_batch_and_the_fewest_devices_that_fit() -> None:
    get("gpt2")
    Path("gpt.json").write_text(json.dumps({**GPT2, "n_positions": 64}))
    asked = ("fits", "hf:gpt.json", *CARD, "--batch", "1", "--solve", "batch")
    found = run_json(*asked, "--budget", "68MiB")
    largest = found["solved"]["batch"]
    assert largest > 1
    beyond = run_json(*asked[:4], "--batch", str(largest + 1), "--budget", "68MiB")
    assert not any(row["fits"] for row in beyond["rungs"] if row["name"] == "as asked")
    text = run(*asked[:-1], "gpus").stdout
    assert "It fits: " in text
    assert "gpus: 1, the fewest that fits" in text


def test_the_mesh_with_the_most_tokens_per_second() -> None:
    get("gpt2")
    asked = ("fits", "hf:gpt2.json", "--gpu", "H100", "--batch", "1", "--solve", "mesh")
    found = run_json(*asked, "--gpus", "2", "--sequence", "5000")
    assert found["sequence"] == GPT2["n_positions"]  # It allows no more.
    assert found["solved"]["mesh"] in [row["mesh"] for row in found["meshes"]]
    why = {tuple(row["mesh"].items()): row["why"] for row in found["meshes"]}
    assert "no tp_plan" in why[("data", 1), ("tensor", 2)]
    refused = run(*asked)
    assert "say how many (--gpus 64)" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "RTX4080"), "--device: unknown device 'RTX4080'; did you mean RTX4090"),
        ((*CARD, "--capacity", "24"), "--capacity: 24 is 24 bytes: write the unit, such as 24GiB"),
        ((*CARD, "--lora", "r=0"), "--lora: 'r=0' is no rank of adapters: write r=16"),
        ((*CARD, "--solve", "time"), "--solve: there is no 'time' to solve for; take batch"),
        ((*CARD, "--returns", "none"), '--returns: returns= is "all" or "loss"'),
        ((*CARD, "--device-file", "d.json"), "--device-file: the file names a device, and"),
        (("--device-file", "d.json"), "--device-file: d.json: a device has no memory; it has"),
        (("--budget", "0.5"), "--budget: '0.5' is no number of bytes of a device"),
        (("--budget", "min"), "--budget: 'min' is no number of bytes of a device"),
        (("--solve", "batch"), "--solve: goes with an estimate (--device H100)"),
        ((), "name a device (--gpu RTX4090), or a budget of this one"),
    ],
)
def test_wrong_values(arguments: tuple[str, ...], said: str) -> None:
    Path("d.json").write_text('{"memory": 3}')
    result = run("fits", "mymodels:two", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert said in " ".join(result.stderr.split())


def test_a_device_of_a_file() -> None:
    Path("d.json").write_text('{"like": "A100", "name": "mine", "memory_bytes_per_s": 1e12}')
    asked = ("plan", "mymodels:two", "--mode", "estimate", "--device-file", "d.json")
    found = run_json(*asked, "--strategy", "store-all", "--lora", "r=2")
    assert found["device"] == "mine"


def test_a_budget_without_a_unit_is_asked_about() -> None:
    result = run("fits", "mymodels:two", *CARD, "--budget", "24")
    assert 'did you mean "24GiB"?' in " ".join(result.stderr.split())
    for command in ("plan", "compare", "fits"):
        asked = (command, "mymodels:two", "--budget", "24", "--strategy", "store-all")
        assert 'did you mean "24GiB"?' in " ".join(run(*asked).output.split())
    result = run("explore", "mymodels:two", "--capacity", "24")
    assert "error: --capacity: 24 is 24 bytes" in " ".join(result.stderr.split())
    with pytest.raises(memopt.InfeasibleBudgetError, match='did you mean "1GiB"'):
        memopt.plan(random_training_graph(0), budget=1, strategy="store-all", progress=False)


def test_ranks_of_adapters() -> None:
    assert (rank_of(None), rank_of("r=8"), rank_of("16")) == (0, 8, 16)


COMMANDS = ("plan", "compare", "explore", "fits", "profile")


def small(command: str) -> tuple[str, ...]:
    """Arguments for which a command is quick."""
    chosen = {"profile": (), "fits": ("--budget", "1GiB"), "explore": ("--points", "2")}
    more = chosen.get(command, ("--budget", "1GiB"))
    return (
        command,
        "mymodels:make",
        *more,
        *(("--strategy", "store-all") * (command != "profile")),
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_options_mean_the_same_in_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StepOptions] = []
    priced: list[tuple[Any, ...]] = []

    def heard(
        model: Any, inputs: Any, step: Any, pricing: Any, device: Any, *rest: Any, **how: Any
    ) -> Any:
        found = profiled_for(model, inputs, step, pricing, device, *rest, **how)
        asked.append(step)
        ranks = {t.target for t in found.graph.operators if t.collective is not None}
        adapters = sum(p.requires_grad for p in model.parameters())
        priced.append((pricing.mode, device.name, device.capacity_bytes, bool(ranks), adapters))
        return found

    for room in ("solving", "planning", "comparing", "fits"):
        monkeypatch.setattr(f"memopt.api.{room}.profiled_for", heard, raising=False)
    monkeypatch.setattr("memopt.stages.stages.profiled_for", heard)
    Path("d.json").write_text(json.dumps({"like": "A100", "name": "mine"}))
    options = ("--capacity", "2GiB", "--lora", "r=2", "--returns", "loss", "--ranks", "2")
    result = run(*small(command), "--device-file", "d.json", *options)
    assert result.exit_code == 0, result.output
    assert asked[0].returns == "loss"
    assert priced[0][:4] == ("estimate", "mine", 2 * 2**30, True)
    assert priced[0][4] > 0
    measured = run(*small(command), "--gpu", "A100", "--mode", "measure")
    assert measured.exit_code == 0, measured.output
    assert priced[-1][0] == "measure"
    for wrong, said in (
        (("--returns", "none"), '--returns: returns= is "all" or "loss"'),
        (("--ranks", "2"), "--ranks: asks about a cluster that is not there"),
        (("--gpu", "H10"), "--device: unknown device 'H10'; did you mean H100"),
    ):
        refused = run(*small(command), *wrong)
        assert refused.exit_code == ExitCode.USAGE
        assert said in " ".join(refused.stderr.split())
