"""What CUDA's operators save and take beside the CPU's, in estimates for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from memopt.models.graph import Graph, Operator
from memopt.models.presets import A100, CPU_CORE, H100
from memopt.pricing.workspace import cublas_workspace_bytes
from memopt.profiler import estimate_model

BATCH, HEADS, ROWS, DEPTH = 2, 4, 40, 16


class Attention(nn.Module):
    """Self-attention, with dropout in training."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = nn.Linear(HEADS * DEPTH, 3 * HEADS * DEPTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).view(BATCH, ROWS, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        return mixed.transpose(1, 2).reshape(BATCH, ROWS, -1)


def attention_of(graph: Graph) -> Operator:
    return next(o for o in graph.operators if "flash_attention" in o.target)


def estimated(model: nn.Module, inputs: torch.Tensor, device=H100):
    return estimate_model(model.to(torch.bfloat16), inputs.to(torch.bfloat16), device)


def test_fused_attention_saves_row_sums_and_the_random_state() -> None:
    inputs = torch.empty(BATCH, ROWS, HEADS * DEPTH)
    profiled = estimated(Attention(0.0), inputs)
    operator = attention_of(profiled.graph)
    sizes = [profiled.graph.tensors[t].size_bytes for t in operator.writes]
    assert sizes == [2 * BATCH * ROWS * HEADS * DEPTH, 4 * BATCH * HEADS * 64 + 1024]
    assert any("row sums" in note for note in profiled.notes)
    backward = [o for o in profiled.graph.operators if "attention_for_cpu_backward" in o.target]
    # dQ is summed in float32, and there is one number per row.
    assert backward[0].workspace_bytes == 4 * BATCH * HEADS * ROWS * (DEPTH + 1)


class Shared(nn.Module):
    """Attention whose query heads share keys and values."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.query = nn.Linear(HEADS * DEPTH, HEADS * DEPTH)
        self.key = nn.Linear(HEADS * DEPTH, groups * DEPTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).view(BATCH, ROWS, HEADS, DEPTH).transpose(1, 2)
        key = self.key(x).view(BATCH, ROWS, self.groups, DEPTH).transpose(1, 2)
        shared = self.groups < HEADS
        return functional.scaled_dot_product_attention(query, key, key, enable_gqa=shared)


def test_backward_of_shared_keys_makes_gradients_of_all_heads() -> None:
    taken = []
    for groups in (HEADS, 1):
        graph = estimated(Shared(groups), torch.empty(BATCH, ROWS, HEADS * DEPTH)).graph
        backward = [o for o in graph.operators if "attention_for_cpu_backward" in o.target]
        taken.append(backward[0].workspace_bytes)
    # dK and dV in the computing dtype, for each query head.
    assert taken[1] - taken[0] == 2 * 2 * BATCH * HEADS * ROWS * DEPTH


def test_attention_with_dropout_stays_fused_for_cuda_only() -> None:
    inputs = torch.empty(BATCH, ROWS, HEADS * DEPTH)
    with_dropout = estimated(Attention(0.1), inputs).graph
    without = estimated(Attention(0.0), inputs).graph
    assert with_dropout == without
    on_cpu = estimated(Attention(0.1), inputs, CPU_CORE).graph
    assert not any("flash_attention" in o.target for o in on_cpu.operators)
    assert functional.scaled_dot_product_attention.__module__ != "memopt.capture.fake"


def test_half_precision_images_are_transposed_in_workspace() -> None:
    convolution = nn.Conv2d(8, 16, 3, padding=1)
    images = torch.empty(2, 8, 16, 16)
    graph = estimated(convolution, images).graph
    (forward,) = [o for o in graph.operators if o.target == "aten.convolution.default"]
    assert forward.workspace_bytes == 2 * (2 * 8 * 256 + 16 * 8 * 9 + 2 * 16 * 256)
    last = images.to(memory_format=torch.channels_last)
    graph = estimated(convolution, last).graph
    (forward,) = [o for o in graph.operators if o.target == "aten.convolution.default"]
    assert forward.workspace_bytes == 0


def test_cublas_workspaces() -> None:
    assert cublas_workspace_bytes(H100.name) == 2 * 32 * 2**20
    assert cublas_workspace_bytes(A100.name) == 2 * 8320 * 1024
    assert cublas_workspace_bytes("something new") == 2 * 32 * 2**20
