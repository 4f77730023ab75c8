"""What a trace leaves out is left out of that trace alone."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.capture.lean_trace import lean_trace


def described() -> list[Any]:
    """What a trace says of its values beside the values themselves."""
    traced = make_fx(lambda x: (x.sin() * 2).sum(), tracing_mode="fake")(torch.ones(3))
    found = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert all(isinstance(node.meta["val"], Tensor) for node in found)
    return [node.meta["tensor_meta"] for node in found]


def test_other_threads_and_later_traces_are_as_ever() -> None:
    elsewhere: list[Any] = []
    with lean_trace():
        thread = threading.Thread(target=lambda: elsewhere.extend(described()))
        thread.start()
        thread.join()
        assert described() == [None, None, None]
    assert len(elsewhere) == 3
    assert None not in elsewhere
    assert None not in described()
