"""Joint graphs from disk are those that a trace would give, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.profiler import joint_cache, joint_key
from memopt.profiler.foreign_code import foreign_code
from memopt.profiler.joint_store import LARGEST_GRAPH_BYTES, MOST_GRAPHS, JointStore
from tests import zoo
from tests.profiler.kept_joints import Reads, captured, lines


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setattr(joint_cache, "FEWEST_NODES", 0)
    return Reads(monkeypatch)


class Block(nn.Module):
    """Linear, dropout, batch norm and attention; a view of the input is added at the end."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(x)).relu())
        z = self.second(y).view(1, 2, -1, 8)
        return nn.functional.scaled_dot_product_attention(z, z, z).flatten() + x.reshape(-1)


def inputs() -> Tensor:
    return torch.randn(6, 8)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one.name in ("mlp", "gpt2", "unet") else pytest.mark.slow)
        for one in zoo.FAMILIES
    ],
    ids=str,
)
def test_families(family: zoo.Family, tmp_path: Path, reads: Reads) -> None:
    model, given, store = family.build("tiny"), family.inputs("tiny"), JointStore(tmp_path)
    fresh = lines(captured(model, given))
    assert lines(captured(model, given, store)) == fresh
    assert (reads.known, reads.stored) == (0, 1)
    assert lines(captured(model, given, store)) == fresh
    assert (reads.known, reads.stored) == (1, 1)


def trained(model: nn.Module, plan: memopt.Plan) -> list[Tensor]:
    planned = plan.apply(model)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        output = planned(inputs())
        output.square().sum().backward()
        found += [output.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*found, *(b.clone() for b in model.buffers())]


def test_steps_are_the_same(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    steps = []
    for _ in range(3):
        torch.manual_seed(0)
        model = Block()
        plan = memopt.plan(model, inputs(), budget="min", strategy="rotor", progress=False)
        steps.append(trained(model, plan))
    assert (reads.known, reads.stored) == (2, 1)
    for other in steps[1:]:
        assert all(map(torch.equal, steps[0], other))


def test_nothing_is_kept_without_a_cache(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    memopt.profile(Block(), inputs(), cache=False, progress=False)
    assert not reads.keys
    assert not list(tmp_path.iterdir())


class WithHooks(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y


class Other(Block):
    """The same computation; `first` is called inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first)  # type: ignore[assignment]


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


class Transposed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight = nn.Parameter(self.first.weight.detach().clone().t())


class Scaled(Block):
    """Another number in the forward, which differs in the sign of zero alone."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.factor


def evaluated() -> Block:
    return Block().eval()


_OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "evaluated": (evaluated, inputs),
    "frozen": (Frozen, inputs),
    "tied": (Tied, inputs),
    "transposed parameter": (Transposed, inputs),
    "doubles": (lambda: Block().double(), lambda: inputs().double()),
    "more rows": (Block, lambda: torch.randn(12, 8)),
    "an input with a gradient": (Block, lambda: inputs().requires_grad_()),
    "a transposed input": (Block, lambda: torch.randn(8, 6).t()),
    "an input with gaps": (Block, lambda: torch.randn(6, 16)[:, ::2]),
    "an input in the middle": (Block, lambda: torch.randn(7, 8)[1:]),
    "zero": (lambda: Scaled(0.0), inputs),
    "minus zero": (lambda: Scaled(-0.0), inputs),
    "a whole number": (lambda: Scaled(0), inputs),
    "infinity": (lambda: Scaled(float("inf")), inputs),
    "not a number": (lambda: Scaled(float("nan")), inputs),
}


def test_other_models_and_inputs(tmp_path: Path, reads: Reads) -> None:
    """Each has a key of its own, and later the graph of its trace."""
    store = JointStore(tmp_path)
    captured(Block(), inputs(), store)
    for make, given in _OTHERS.values():
        model = make()
        traced = lines(captured(model, given(), store))
        assert lines(captured(model, given(), store)) == traced
    assert len(set(reads.keys)) == 1 + len(_OTHERS)
    assert reads.known == len(_OTHERS)


def test_modules_of_other_names_have_their_own(tmp_path: Path, reads: Reads) -> None:
    store = JointStore(tmp_path)
    captured(Block(), inputs(), store)
    model = Other()
    assert lines(captured(model, inputs(), store)) == lines(captured(model, inputs()))


def set_to(function: Callable[[Any], None], value: Any, before: Any) -> Any:
    @contextlib.contextmanager
    def context() -> Any:
        function(value)
        try:
            yield
        finally:
            function(before)

    return context


def flag(home: Any, name: str, value: Any) -> Any:
    return set_to(lambda one: setattr(home, name, one), value, getattr(home, name))


_SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "default dtype": set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": set_to(torch.use_deterministic_algorithms, True, False),
    "precision": set_to(torch.set_float32_matmul_precision, "medium", "highest"),
    "mkldnn": flag(torch.backends.mkldnn, "enabled", False),
    "cudnn": flag(torch.backends.cudnn, "enabled", False),
    "a function of torch's own": flag(nn.functional, "relu", nn.functional.elu),
    "a method of torch's own": flag(Tensor, "relu", Tensor.sin),
    "threads": set_to(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
}


def test_settings_of_torch(tmp_path: Path, reads: Reads) -> None:
    store, model = JointStore(tmp_path), Block()
    captured(model, inputs(), store)
    for setting in _SETTINGS.values():
        with setting():
            captured(model, inputs(), store)
    assert len(set(reads.keys)) == 1 + len(_SETTINGS)
    assert not reads.known


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


def test_order_of_attention_kernels(reads: Reads) -> None:
    """Which of several the trace takes."""
    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    device = torch.device("cpu")
    plain = joint_key.joint_key(torch.fx.symbolic_trace(nn.Identity()), [], [], device)
    with sdpa_kernel([*order, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        other = joint_key.joint_key(torch.fx.symbolic_trace(nn.Identity()), [], [], device)
    assert plain != other


def test_a_graph_does_not_depend_on_what_was_traced_before() -> None:
    """Of an LSTM torch remembered one gradient of two biases as two."""
    model, x = nn.LSTM(4, 4, 2), torch.randn(3, 2, 4)
    first = lines(captured(model, x))
    assert lines(captured(model, x)) == first


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_LOOKING_ON: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Looks,
    "a default device": lambda: torch.device("cpu"),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "anomalies": torch.autograd.detect_anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_whoever_looks_on_sees_a_trace(tmp_path: Path, reads: Reads) -> None:
    model = Block()
    captured(model, inputs(), JointStore(tmp_path))
    for name, around in _LOOKING_ON.items():
        with around(), contextlib.suppress(memopt.CaptureError):
            captured(model, inputs(), JointStore(tmp_path))
        assert len(reads.keys) == 1, name


@torch.library.custom_op("memopt_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return twice(super().forward(x))


class Constant(Block):
    """Holds a tensor whose numbers are part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([2.0])


@pytest.mark.parametrize("make", [Custom, WithHooks, Constant])
def test_what_no_key_names_is_traced_each_time(
    make: Callable[[], nn.Module], tmp_path: Path, reads: Reads
) -> None:
    model, store = make(), JointStore(tmp_path)
    fresh = lines(captured(model, inputs()))
    for _ in range(2):
        assert lines(captured(model, inputs(), store)) == fresh
    assert not reads.stored


_PROGRAM = """
import sys, torch, memopt
from memopt.profiler import joint_cache, joint_key
from memopt.profiler.foreign_code import foreign_code
from tests.profiler.test_joint_cache import Block, inputs
joint_cache.FEWEST_NODES = 0
found, unpacked = [], joint_cache._unpacked
def told(*args):
    found.append(unpacked(*args))
    return found[-1]
joint_cache._unpacked = told
torch.manual_seed(0)
plan = memopt.plan(Block(), inputs(), budget="min", strategy="rotor", progress=False)
print(len(found), sum(one is not None for one in found), plan.record.fingerprint)
"""


@pytest.mark.slow
def test_other_processes(tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "MEMOPT_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        answers.append(run.stdout.split())
    assert answers[0][:2] == ["0", "0"]
    assert answers[1][:2] == ["1", "1"]
    assert answers[0][2] == answers[1][2]


def database(folder: Path) -> Path:
    return folder / "graphs-v1" / "graphs.sqlite"


def test_a_damaged_graph_is_traced_anew(tmp_path: Path, reads: Reads) -> None:
    store, model = JointStore(tmp_path), Block()
    fresh = lines(captured(model, inputs(), store))
    with closing(sqlite3.connect(database(tmp_path))) as connection, connection:
        (graph,) = connection.execute("SELECT graph FROM graphs").fetchone()
        connection.execute("UPDATE graphs SET graph = ?", (graph[:-1] + b"\0",))
    assert store.load(reads.keys[0]) is None
    assert lines(captured(model, inputs(), store)) == fresh
    # What another memopt or torch may have written: whole, but no graph.
    absent = zlib.compress(b"cno_such_module\nname\n.")
    for other in (b"", b"no graph", graph[: len(graph) // 2], absent):
        store.store(reads.keys[0], other)
        assert lines(captured(model, inputs(), store)) == fresh
    assert not reads.known
    captured(model, inputs(), store)
    assert reads.known == 1


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")
def test_what_others_may_write_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor in a folder where they may put a journal, which would be played into the file."""
    store = JointStore(tmp_path)
    store.store("key", b"graph")
    file = database(tmp_path)
    for path, own, shared in ((file, 0o600, 0o660), (file.parent, 0o700, 0o777)):
        assert stat.S_IMODE(path.stat().st_mode) == own
        path.chmod(shared)
        assert store.load("key") is None
        assert "chmod go-w" in caplog.text
        path.chmod(own)
        assert store.load("key") == b"graph"
    if os.getuid() == 0:
        os.chown(file.parent, 12345, 12345)
        assert store.load("key") is None


def test_a_process_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MEMOPT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    store = JointStore()
    store.store("key", b"graph")
    assert store.load("key") is None


def test_a_folder_that_cannot_be_written(tmp_path: Path, reads: Reads) -> None:
    (tmp_path / "file").write_text("in the way")
    store, model = JointStore(tmp_path / "file"), Block()
    assert lines(captured(model, inputs(), store)) == lines(captured(model, inputs()))
    assert not reads.known


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = JointStore(tmp_path)
    for number in range(MOST_GRAPHS):
        store.store(f"{number}", b"graph")
    store.store("0", b"again")
    store.store("one more", b"graph")
    assert store.load("1") is None
    assert (store.load("0"), store.load("2"), store.load("one more")) == (
        b"again",
        b"graph",
        b"graph",
    )
    store.store("2", bytes(LARGEST_GRAPH_BYTES + 1))
    assert store.load("2") == b"graph"


def test_several_threads(tmp_path: Path, reads: Reads) -> None:
    store, models = JointStore(tmp_path), [Block(), Frozen(), Tied(), Block()]
    fresh = [lines(captured(model, inputs())) for model in models]
    found: dict[int, list[Any]] = {}

    def work(place: int) -> None:
        found[place] = [lines(captured(models[place], inputs(), store)) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(models))] == [[one] * 2 for one in fresh]
