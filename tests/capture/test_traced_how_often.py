"""A forward is not traced again where it is known how that ends: a large one takes long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.import_utils import torch_compilable_check

from memopt.capture import trace
from memopt.capture.as_eager.corrections import tracing_as_eager
from memopt.capture.lean_trace import lean_trace
from memopt.errors import CaptureError
from memopt.step.inputs import Call
from tests.capture.test_usual_branches import Block


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that are traced, in order."""
    found: list[nn.Module] = []
    captured = trace._captured

    def heard(model: nn.Module, *others: Any) -> Any:
        found.append(model)
        return captured(model, *others)

    monkeypatch.setattr(trace, "_captured", heard)
    return found


def test_blocks_that_look_at_values_are_not_traced_as_if_they_did_not(
    traces: list[nn.Module],
) -> None:
    model = nn.Sequential(*[Block() for _ in range(8)])
    with tracing_as_eager(torch.device("cpu")), lean_trace():
        trace.trace_of(model, Call((torch.randn(8, 16),), {}))
    assert len(traces) == 2


class Packs(nn.Module):
    """Asks here and there whether it is compiled, then does what no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            x = x.sin()
        if torch.compiler.is_compiling():
            x = x.cos()
        if torch.compiler.is_compiling():
            x = x.exp()
        return nn.utils.rnn.pack_sequence([self.linear(x)])


def test_what_is_refused_compiled_or_not_is_asked_once_each(traces: list[nn.Module]) -> None:
    with (
        pytest.raises(CaptureError, match="pack_padded_sequence"),
        tracing_as_eager(torch.device("cpu")),
        lean_trace(),
    ):
        trace.trace_of(Packs(), Call((torch.randn(2, 4),), {}))
    assert len(traces) == 2


class Checks(nn.Module):
    """Checks its argument as Hugging Face's models of images and texts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        torch_compilable_check(len(x) == 2, "other rows")
        return self.linear(x)


def test_a_check_of_transformers_is_traced_in_one_way(traces: list[nn.Module]) -> None:
    with tracing_as_eager(torch.device("cpu")), lean_trace():
        trace.trace_of(Checks(), Call((torch.randn(2, 4),), {}))
    assert len(traces) == 1
