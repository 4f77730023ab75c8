"""What is said of dynamo's explanations, and of buffers that a forward makes or assigns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.capture.capture import capture
from memopt.capture.trace import _failed_in_dynamo
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


class Checks(nn.Module):
    """Looks at values: as a model that has inner parts, as a layer, or as a loss."""

    def __init__(self, inner: nn.Module | None = None, trained: bool = True) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(3, 3) if trained else nn.Identity(), inner

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        if self.inner is not None:
            return self.inner(self.linear(x))
        return self.linear(x) if torch.rand(()) > 0 else x


@pytest.mark.parametrize(
    ("model", "may_be_loss"),
    [
        (Checks(), True),
        (Checks(Checks(trained=False)), True),
        (Checks(Checks(Checks())), False),
    ],
)
def test_labels_are_named_where_a_loss_may_fail(model: nn.Module, may_be_loss: bool) -> None:
    """Leaving out labels was advised of layers that fail without them, too."""
    call = to_call({"x": torch.randn(2, 3), "labels": torch.randn(2, 3)})
    with pytest.raises(CaptureError, match="data-dependent") as refused:
        capture(model, call)
    assert ("call it without labels" in str(refused.value)) == may_be_loss


class Convolves(nn.Linear):
    """A graph convolution that leaves out the graph's own self-loops, as torch_geometric's do."""

    def __init__(self, without_loops: Callable[[Tensor], Tensor]) -> None:
        super().__init__(3, 3)
        self.without_loops = without_loops

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = self.without_loops(edges)
        return torch.zeros_like(x).index_add(0, target, super().forward(x)[source])


def test_graphs_get_their_self_loops_before_the_call(tmp_path: Path) -> None:
    """Neither a mask nor memopt.opaque can be put into the library's code."""
    path = tmp_path / "torch_geometric" / "utils" / "loop.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "def remove(edges):\n    return edges[:, edges[0] + torch.rand(3) > edges[1]]\n"
    )
    library: dict[str, Any] = {"torch": torch}
    exec(compile(path.read_text(), str(path), "exec"), library)
    call = to_call((torch.ones(4, 3), torch.tensor([[0, 1, 2], [1, 1, 3]])))
    with pytest.raises(CaptureError, match=r"add_self_loops=False"):
        capture(Convolves(library["remove"]), call)
    capture(Convolves(lambda edges: edges), call)


class Keeping(nn.Module):
    """Keeps an object in a dict that it makes."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.found: Any = {"kept": self.kept, "y": y}
        return y


class Returning(Keeping):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.kept


@pytest.mark.parametrize(
    ("kind", "kept", "said"),
    [
        (Keeping, torch.relu, "changes Python state of model.found"),
        (Keeping, torch.float32, "or keeps one in a list or dict that it makes"),
        (Returning, torch.relu, "returns an object of Python .*leave it out of what it returns"),
    ],
)
def test_objects_beside_tensors(kind: type[Keeping], kept: Any, said: str) -> None:
    """A function there ended in a SyntaxError of the graph's code."""
    with pytest.raises(CaptureError, match=said):
        capture(kind(kept), to_call(torch.ones(2, 4)))


def test_a_guard_that_cannot_be_read_is_a_refusal_with_a_remedy() -> None:
    """What dynamo guards is read by evaluating text (a lazy property of a distribution has no
    `wrapped`): the AttributeError came through, and parts="auto" did not open the module."""
    text = "lambda one: eval('one.wrapped', {}, {'one': one})"
    read = eval(text, {"__name__": "torch._guards"})
    with pytest.raises(AttributeError) as raised:
        read(object())
    refusal = _failed_in_dynamo(raised.value)
    assert 'parts="auto"' in str(refusal)
