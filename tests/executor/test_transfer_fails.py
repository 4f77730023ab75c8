"""A transfer that fails half-way: nothing of the training state changes, everything is released,
and the next step is eager's, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.executor import swap as swap_module
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap import HostCopy, ThreadSwap
from memopt.executor.swap_streams import StreamSwap
from tests.executor.harness import prepare, swap_all


class LinkError(RuntimeError):
    """The failure these tests cause."""


class WatchedSwap(ThreadSwap):
    """Remembers, weakly, what it was given and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.device: list[weakref.ref[Tensor]] = []
        self.host: list[weakref.ref[HostCopy]] = []
        self.fails_at: dict[str, int] = {}

    def count(self, name: str) -> None:
        """Raise at the call of that name that is to fail."""
        if name in self.fails_at:
            self.fails_at[name] -= 1
            if self.fails_at[name] < 0:
                del self.fails_at[name]
                raise LinkError(name)

    def out(self, tensor: Tensor, address: int | None = None, lease: None = None) -> HostCopy:
        self.count("out")
        made = super().out(tensor, address, lease)
        self.device.append(weakref.ref(tensor))
        self.host.append(weakref.ref(made))
        return made

    def bring(self, copy: HostCopy) -> Tensor:
        self.count("bring")
        made = super().bring(copy)
        self.device.append(weakref.ref(made))
        return made

    @property
    def alive(self) -> int:
        """Device tensors and host copies that are still there."""
        return sum(x() is not None for x in self.device + self.host)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    """One step; its gradients stay, so that the next accumulates into them."""
    torch.manual_seed(seed)
    loss: Tensor = module(inputs(seed)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of the training state, by name."""
    found: dict[str, Any] = {k: v.clone() for k, v in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        found[f"grad {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for key, state in optimizer.state_dict()["state"].items():
        found.update({f"optimizer {key} {k}": copy.deepcopy(v) for k, v in state.items()})
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else not found[name]
        assert same, name


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collector: what is in a cycle counts as leaked."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_forward(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    module(inputs(seed))


def in_backward(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    module(inputs(seed)).square().sum().backward()


WAYS: dict[str, tuple[str, Callable[[nn.Module, int], None]]] = {
    "no copy out": ("out", in_forward),
    "copy out": ("_fill", in_forward),
    "no copy back": ("bring", in_backward),
    "copy back": ("_empty_into", in_backward),
}


@pytest.mark.parametrize("interpreted", [False, True], ids=["generated", "interpreted"])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_state_stays_and_memory_goes(
    way: str, number: int, interpreted: bool, uncollected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_model, eager = model(), model()
    prepared = prepare(planned_model, (inputs(0),))
    swap = WatchedSwap()
    program = swap_all(prepared.graph)
    installed = install(
        prepared.captured, prepared.lowering, program, interpreted=interpreted, swap=swap
    )
    runtime = runtime_of(prepared.captured)
    planned = PlannedModule(planned_model, prepared.captured, runtime, installed)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (planned_model, eager)]
    assert torch.equal(step(planned, optimizers[0], 1), step(eager, optimizers[1], 1))
    assert (swap.account.now_bytes, swap.alive, prepared.waiting) == (0, 0, 0)

    for name in ("_fill", "_empty_into"):
        original = getattr(swap_module, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> None:
            swap.count(name)
            original(*args)

        monkeypatch.setattr(swap_module, name, counted)
    failing, attempt = WAYS[way]
    before = everything(planned_model, optimizers[0])
    swap.fails_at[failing] = number
    caught = ""
    try:
        attempt(planned, 2)
    except LinkError as error:
        caught = str(error)
    assert caught == failing
    after = everything(planned_model, optimizers[0])
    if attempt is in_backward:
        # Eager's running statistics, too, are those after the forward by then.
        torch.manual_seed(2)
        eager(inputs(2))
        before.update({name: value.clone() for name, value in eager.named_buffers()})
    assert_equal(after, before)
    # The worker may hold the last task for a moment: a further task ends after it.
    swap._worker.submit(int).result()
    assert (swap.account.now_bytes, swap.alive, prepared.waiting) == (0, 0, 0)

    assert torch.equal(step(planned, optimizers[0], 3), step(eager, optimizers[1], 3))
    assert_equal(everything(planned_model, optimizers[0]), everything(eager, optimizers[1]))
    assert (swap.account.now_bytes, swap.alive, prepared.waiting) == (0, 0, 0)


class BrokenStreams:
    """Streams whose copies back cannot start."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []

    def here(self) -> str:
        return "compute"

    def mark(self, home: Any) -> None:
        """All is over at once."""

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Any) -> None:
        if not outward:
            raise LinkError("copy")
        target.copy_(source)

    def wait(self, event: Any, home: Any) -> None:
        """Nothing is under way."""

    def device_bytes(self, size_bytes: int) -> Tensor:
        made = torch.empty(size_bytes, dtype=torch.uint8)
        self.made.append(weakref.ref(made))
        return made

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


def test_a_host_copy_keeps_no_device_memory_of_a_copy_that_could_not_start(
    uncollected: None,
) -> None:
    streams = BrokenStreams()
    swap = StreamSwap(streams, 64)
    kept = swap.out(torch.ones(16), 0, swap.lease())
    caught = False
    try:
        swap.bring(kept)
    except LinkError:
        caught = True
    assert caught
    assert [made() for made in streams.made] == [None]
    del kept
    assert swap.account.now_bytes == 0
