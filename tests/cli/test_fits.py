"""`memopt fits`: the ladder, and options that mean the same in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memopt
from memopt.commands.options import rank_of
from memopt.commands.output import ExitCode
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
        (("--solve", "batch"), "--solve: goes with an estimate (--device H100)"),
        ((), "name a device (--gpu RTX4090), or a budget of this one"),
        ((*CARD, "--strategy", "auto", "--returns", "loss"), "--returns: goes with an estimate"),
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
    with pytest.raises(memopt.InfeasibleBudgetError, match='did you mean "1GiB"'):
        memopt.plan(random_training_graph(0), budget=1, strategy="store-all", progress=False)


def test_ranks_of_adapters() -> None:
    assert (rank_of(None), rank_of("r=8"), rank_of("16")) == (0, 8, 16)
