"""While code that is not torch's stands where torch's own is expected, no graph is kept or read."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from memopt.profiler.foreign_code import foreign_code
from memopt.profiler.joint_store import JointStore
from tests import zoo
from tests.profiler.kept_joints import Block, Reads, captured, flag, inputs, lines


def twice_softmax(*args: Any, **kwargs: Any) -> Tensor:
    return torch.softmax(*args, **kwargs) * 2


@contextlib.contextmanager
def registered(key: str) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x.sin(), key)
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    relu = torch.ops.aten.relu.default
    relu.py_impl(torch._C.DispatchKey.Autograd)(lambda x: x.sin())
    relu._dispatch_cache.clear()
    try:
        yield
    finally:
        del relu.py_kernels[torch._C.DispatchKey.Autograd]
        relu._dispatch_cache.clear()


_FOREIGN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a function": flag(nn.functional, "softmax", twice_softmax),
    "a wrapped function": flag(
        nn.functional, "softmax", functools.wraps(nn.functional.softmax)(twice_softmax)
    ),
    "a partial function": flag(nn.functional, "softmax", functools.partial(twice_softmax, dim=1)),
    "a mock": flag(nn.functional, "softmax", mock.Mock(side_effect=twice_softmax)),
    "a method": flag(Tensor, "relu", lambda x: x.sin()),
    "what stands in while tracing": flag(torch._decomp, "core_aten_decompositions", twice_softmax),
    "a kernel": lambda: registered("CPU"),
    "a derivative": lambda: registered("AutogradCPU"),
    "a rounding": lambda: registered("AutocastCPU"),
    "a kernel of the tracer": in_python,
}


@pytest.mark.filterwarnings("ignore:.*Warning only once for all operators")
@pytest.mark.filterwarnings("ignore:Overriding a previously registered kernel")
def test_code_in_the_place_of_torchs_own(tmp_path: Path, reads: Reads) -> None:
    """Attention packages replace functions, extensions register kernels for ATen's operators."""
    store, model = JointStore(tmp_path), Block()
    captured(model, inputs(), store)
    for name, place in _FOREIGN.items():
        with place():
            assert foreign_code() is not None, name
            captured(model, inputs(), store)
        assert foreign_code() is None, name
    assert len(reads.keys) == 1
    captured(model, inputs(), store)
    assert reads.known == 1


def test_models_and_trainers_that_import_much_are_kept() -> None:
    """Nothing in the packages that models are made of, and trained with, is taken for a patch."""
    for family in zoo.FAMILIES:
        family.build("tiny")
    for trainer in ("accelerate", "lightning.pytorch", "peft", "transformers.trainer"):
        importlib.import_module(trainer)
    assert torch.compile.__module__ != "lightning.fabric.wrappers"  # It pretends to be torch's.
    assert "lightning" in torch.compile.__code__.co_filename
    assert foreign_code() is None


def test_attention_of_somebody_else(tmp_path: Path, reads: Reads) -> None:
    """`nn.MultiheadAttention` is one function in dynamo's graph, which calls what was replaced."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    x, store = torch.randn(2, 5, 16), JointStore(tmp_path)
    captured(layer, x, store)

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.softmax(2 * (q @ k.transpose(-2, -1)), -1) @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", attention)
        fresh = lines(captured(layer, x))
        assert lines(captured(layer, x, store)) == fresh
        store = JointStore(tmp_path / "its own")
        captured(layer, x, store)
    assert lines(captured(layer, x, store)) == lines(captured(layer, x)) != fresh
