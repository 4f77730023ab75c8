"""The command line called as a user would, and a user's models for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from memopt.cli import app
from memopt.commands.output import ExitCode

ROOT = Path(__file__).parents[2]

MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(5)])
    return model, torch.ones(64, 24), lambda output: output.square().mean()

def two():
    return make()[:2]

def fails():
    helper = {}
    return helper["missing"]

def alone():
    return nn.Linear(2, 2)

def misfit():
    return nn.Linear(2, 2), torch.ones(4, 3)

def selecting():
    class Selecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
        def forward(self, x):
            return x[self.linear(x).sum(-1) > 0]
    return Selecting(), torch.ones(4, 2)

class Namespace:
    @staticmethod
    def make():
        return two()

number = 3
"""

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 16,
    "vocab_size": 61,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def run_json(*arguments: str, code: ExitCode = ExitCode.OK) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)
