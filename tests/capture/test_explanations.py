"""What is said of dynamo's explanations, and of buffers that a forward makes or assigns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memopt.capture.capture import capture
from memopt.capture.uncaptured import why_not_captured
from memopt.errors import CaptureError
from memopt.step.inputs import to_call


@pytest.mark.parametrize(
    ("explained", "said"),
    [
        ("it cannot be put into the Dynamo FX graph output", "the Dynamo FX graph output"),
        ("it cannot be put there. Another sentence", "it cannot be put there"),
        ("it cannot be put there.", "it cannot be put there"),
    ],
)
def test_explanations_are_whole(explained: str, said: str) -> None:
    error = ValueError(f"Heading\n  Explanation: {explained}\n  Hint: none")
    found = why_not_captured(nn.Linear(1, 1), to_call(torch.ones(1, 1)), error)
    assert f"{said}). Write that part" in found


class Grows(nn.Module):
    """Makes its table of positions when an input is longer than it, as MusicgenMelody does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), nn.Buffer(torch.ones(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = nn.Buffer(torch.ones(len(x), 3))
        return self.linear(x) * self.table[: len(x)]


def test_a_table_that_the_first_call_makes() -> None:
    model, x = Grows(), torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"nn\.Buffer .*call the model once before planning"):
        capture(model, to_call(x))
    model(x)
    capture(model, to_call(x))


class Assigns(nn.Module):
    """Updates its buffer in place; before, it may assign its .data to itself."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.itself, self.scale = itself, nn.Buffer(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.itself:
            self.scale.data = self.scale.data
        self.scale.mul_(0.9)
        return x * self.scale


def test_data_that_is_assigned_to_itself() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(CaptureError, match=r"it assigns \.data of .*weight\.copy_"):
        capture(Assigns(itself=True), to_call(x))
    capture(Assigns(itself=False), to_call(x))


def test_a_number_that_numpy_computes() -> None:
    """Of BigBird's `int(np.sum(counts))`."""
    error = ValueError(
        "torch.* op returned non-Tensor\n  Explanation: torch.* ops that return a non-Tensor "
        "cannot be traced into the Dynamo FX graph output\n\n  Developer debug context: "
        "example_value type: int; op: call_function; target: <Wrapped method <original item>>"
    )
    found = why_not_captured(nn.Linear(1, 1), to_call(torch.ones(1, 1)), error)
    assert "reads a number out of a numpy array or a tensor" in found
    assert "non-Tensor" not in found
