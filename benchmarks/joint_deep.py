"""Joint plans of deep models of equal layers: planning time against depth (estimated).

    python -m benchmarks.joint_deep [--models NAME ...] [--layers N ...] [--shares X ...]
        [--limit 60] [--device H100] [--resume FILE] [--page FILE]

GPT-2 (the width of the published one) and the shape of Llama 2 70B, in bfloat16 on `meta`, the loss
inside the step, sequences of 1,024 tokens. Budgets are resident bytes + share x (peak - resident)
of store-all. Seconds are CPU time; the planning's are those of one `solve`, the capture's apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.kept import Kept
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.implementations import with_implementations
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.strategies import resolve
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

SEQUENCE = 1024
BATCHES = {"gpt2": 32, "llama-70b": 16}
LAYERS = (10, 20, 40, 80)
SHARES = (0.40, 0.25, 0.15)


@dataclass(frozen=True)
class Row:
    """One plan, or none (overhead None). Overheads over the step as it is; seconds of CPU time."""

    model: str
    layers: int
    share: float
    operators: int
    capture_s: float
    planning_s: float
    overhead: float | None
    gap: float | None
    source: str


def made(name: str, layers: int) -> nn.Module:
    """A model whose forward with labels gives the loss among its outputs."""
    import transformers

    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=layers, use_cache=False, attn_implementation="sdpa"
        )
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).train()


class LossOnly(nn.Module):
    """A language model whose only output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each next token."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def captured(name: str, layers: int, device: Device, folder: Path) -> tuple[Graph, float]:
    """(the graph of the step, CPU seconds of its capture or of reading it from `folder`)."""
    begin = time.process_time()
    path = folder / f"{name}-{layers}-{device.name}.json"
    if path.exists():
        found = loads(path.read_bytes())
        assert isinstance(found, Graph)
        return found, time.process_time() - begin
    with torch.device("meta"):
        model = LossOnly(made(name, layers).to(torch.bfloat16))
        tokens = torch.zeros(BATCHES[name], SEQUENCE, dtype=torch.long)
    profiled = estimate_model(model, (tokens,), device)
    graph = with_implementations(profiled, exact_only=True, device=device).graph
    seconds = time.process_time() - begin
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dumps(graph))
    return graph, seconds
