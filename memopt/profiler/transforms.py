"""`torch.func` inside a forward: `vmap`, `grad` and the like."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def transforms_traced() -> Iterator[None]:
    """Let dynamo trace parameters that a function under a transform reads.

    An export keeps a clone of each real tensor that it meets, which nothing here asks for. Under
    a transform the clone fails: it is a tensor of the transform's, without memory of its own.
    """
    home = importlib.import_module("torch._dynamo.variables.builder")
    clone = getattr(home, "_clone_input", None)
    if clone is None:
        yield
        return

    def clone_outside(value: Any, mode: Any) -> Any:
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        return value if inside else clone(value, mode)

    with mock.patch.object(home, "_clone_input", clone_outside):
        yield
