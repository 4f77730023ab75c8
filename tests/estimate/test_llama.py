"""A Llama-7B shape on one H100, planned without the hardware, the weights or the memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, resource, sys, time
import torch
from tests.zoo import torchvision_shim
import transformers
import memopt
layers = int(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers,
    num_attention_heads=32, max_position_embeddings=4096, use_cache=False,
    attn_implementation="sdpa",
)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(4, 2048, dtype=torch.long)
found = {}
for optimizer in sys.argv[2:]:
    begin = time.process_time()
    try:
        plan = memopt.plan(
            model, {"input_ids": tokens, "labels": tokens}, device="H100", mode="estimate",
            optimizer=optimizer, progress=False,
        )
        found[optimizer] = {"peak": plan.peak_bytes, "time_s": plan.step_time_s,
                            "resident": plan.resident_bytes, "text": str(plan)}
    except memopt.InfeasibleBudgetError as error:
        found[optimizer] = {"refused": str(error)}
    found[optimizer]["cpu_s"] = time.process_time() - begin
found["host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found["parameters"] = sum(p.numel() for p in model.parameters())
print(json.dumps(found))
"""


def run(layers: int, *optimizers: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(layers), *optimizers],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_one_layer_of_it() -> None:
    found = run(1, "adamw-8bit")
    plan, parameters = found["adamw-8bit"], found["parameters"]
    assert found["host_bytes"] < 2 * 2**30
    # bfloat16 parameters, two bytes of state with their scales, and what two cuBLAS handles keep.
    expected_bytes = parameters * (2 + 2 + 8 / 256) + 2 * 32 * 2**20
    assert plan["resident"] == pytest.approx(expected_bytes, rel=0.001)
    flops = 6 * parameters * 4 * 2048
    assert 0.2 < flops / plan["time_s"] / 989e12 < 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llama_7b_on_one_h100() -> None:
    found = run(32, "sgd", "adamw-8bit", "adamw-fp32")
    assert found["parameters"] == 6_738_415_616
    assert found["host_bytes"] < 4 * 2**30
    for optimizer in ("sgd", "adamw-8bit"):
        plan = found[optimizer]
        # Practitioners see 35 to 55% of the peak of an H100 on such models.
        share = 6 * found["parameters"] * 4 * 2048 / plan["time_s"] / 989e12
        assert 0.3 < share < 0.6
        assert plan["peak"] < 78.5 * 2**30
        assert plan["cpu_s"] < 120
    refusal = found["adamw-fp32"]["refused"]
    assert "exp_avg (fp32) 25.1 GiB" in refusal
    assert "master parameters (fp32) 25.1 GiB" in refusal
    assert "= 100.5 GiB" in refusal
