"""Joint graphs from disk are those that a trace would give, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.profiler import joint_key
from memopt.profiler.joint_store import JointStore
from tests import zoo
from tests.profiler.kept_joints import Block, Reads, captured, database, flag, inputs, lines, set_to


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


_FEW = [
    "tied",
    "transposed parameter",
    "an input with gaps",
    "zero",
    "minus zero",
    "a whole number",
]


@pytest.mark.parametrize(
    "others", [_FEW, pytest.param(list(_OTHERS), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_other_models_and_inputs(others: list[str], tmp_path: Path, reads: Reads) -> None:
    """Each has a key of its own, and later the graph of its trace."""
    store = JointStore(tmp_path)
    captured(Block(), inputs(), store)
    for name in others:
        make, given = _OTHERS[name]
        model = make()
        traced = lines(captured(model, given(), store))
        assert lines(captured(model, given(), store)) == traced
    assert len(set(reads.keys)) == 1 + len(others)
    assert reads.known == len(others)


def test_modules_of_other_names_have_their_own(tmp_path: Path, reads: Reads) -> None:
    store = JointStore(tmp_path)
    captured(Block(), inputs(), store)
    model = Other()
    assert lines(captured(model, inputs(), store)) == lines(captured(model, inputs()))


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
import torch, memopt
from memopt.profiler import joint_cache
from tests.profiler.kept_joints import Block, inputs
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


def test_a_folder_that_cannot_be_written(tmp_path: Path, reads: Reads) -> None:
    (tmp_path / "file").write_text("in the way")
    store, model = JointStore(tmp_path / "file"), Block()
    assert lines(captured(model, inputs(), store)) == lines(captured(model, inputs()))
    assert not reads.known


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
