"""What a dynamo trace keeps of real tensors: nothing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def real_values_uncopied() -> Iterator[None]:
    """Trace without copies of parameters, buffers, inputs and their gradients.

    An export keeps a copy of each real tensor that it meets, which nothing here asks for: a model
    would take its own size in memory once more, and as much for its gradients. Under a transform
    (`torch.func.vmap`, `grad`) the copy fails: it is of a tensor without memory of its own.
    """
    home = importlib.import_module("torch._dynamo.variables.builder")
    if not hasattr(home, "_clone_input"):
        yield
        return

    def itself(value: Any, _mode: Any) -> Any:
        return value

    with mock.patch.object(home, "_clone_input", itself):
        yield
