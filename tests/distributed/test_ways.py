"""Ranks of a model cut or sharded over them, of which one alone does something else in a step: what
the model takes unplanned it takes planned, and all else ends every rank in time, in the same
words."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memopt
from tests.distributed import cases, processes

TIMEOUT_S, MARGIN_S = 15, 5
AT = 2
"""The step in which one rank does something else."""


class Checked(nn.Module):
    """Checks its input once all collectives have run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.mlp()[:2]  # the second one's backward communicates

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.inner(input.clamp(-3, 3))
        assert input.detach().abs().max() < 1e6, "too large"
        return output


class Way:
    """How one rank, here if it is `own`, does a step. It may go on from an error."""

    goes_on = sharded = False
    at = AT

    def __init__(self, own: bool) -> None:
        self.own = own

    def begin(self, model: nn.Module) -> None: ...

    def around(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def input(self) -> Tensor:
        return torch.randn(64, 16)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _raising(*_: Any) -> None:
    raise KeyError("here alone")


class LossFails(Way):
    def backward(self, loss: Tensor) -> None:
        _raising() if self.own else loss.backward()


class LossFailsAndGoesOn(LossFails):
    goes_on = True


class NoBackward(Way):
    def backward(self, loss: Tensor) -> None:
        None if self.own else loss.backward()


class GradientsHookFails(Way):
    def begin(self, model: nn.Module) -> None:
        if self.own:
            next(model.parameters()).register_hook(_raising)


class UnplannedBackwardFails(Way):
    """Of a call inside hooks on saved tensors on all ranks, where no plan can serve it."""

    def around(self) -> contextlib.AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    def backward(self, loss: Tensor) -> None:
        if self.own:
            loss.register_hook(_raising)
        loss.backward()


class CheckFailsAndGoesOn(Way):
    goes_on = True

    def input(self) -> Tensor:
        return torch.randn(64, 16) + 1e9 * self.own


class AllChecksFail(Way):
    goes_on = True

    def input(self) -> Tensor:
        return torch.randn(64, 16) + 1e9


class Evaluates(Way):
    def begin(self, model: nn.Module) -> None:
        model.train(not self.own)


class EvaluatesShards(Evaluates):
    """At a step whose charges are not metered."""

    sharded, at = True, 7


class Interrupted(Way):
    def backward(self, loss: Tensor) -> None:
        if self.own:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGINT))
        loss.backward()


class Retains(Way):
    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=self.own)


class Hooked(Way):
    def begin(self, model: nn.Module) -> None:
        next(model.parameters()).register_hook(lambda one: one * 1.0 if self.own else None)


class OtherShapes(Way):
    """Of a sharded model, whose ranks have data of their own."""

    sharded = True

    def input(self) -> Tensor:
        return torch.randn(64 - 16 * self.own, 16)


class Threads(Way):
    def begin(self, model: nn.Module) -> None:
        torch.set_num_threads(1 + self.own)


def trained(
    way: type[Way], rank: int, ranks: int, planned: bool, at: int
) -> tuple[str, list[float], list[Tensor], float]:
    """Train; return the error, losses, this rank's parameters, and the seconds since the step in
    which the last rank does something else."""
    model: Any = Checked()
    cut: Any = {f"inner.{block}.0": ColwiseParallel() for block in range(2)}
    cut |= {f"inner.{block}.2": RowwiseParallel() for block in range(2)}
    mesh = init_device_mesh("cpu", (ranks,))
    memopt.shard(model, mesh) if way.sharded else parallelize_module(model, mesh, cut)
    if planned:
        memopt.wrap(model, "min", "store-all", progress=False)
    kind = torch.optim.SGD if way is Threads and rank else torch.optim.Adam
    optimizer, losses, text = kind(model.parameters(), 1e-2), list[float](), ""
    torch.manual_seed(1)
    begin_s = time.monotonic()
    try:
        for step in range(max(at, AT) + 2):
            one = (way if step == at else Way)(rank == ranks - 1)
            begin_s = time.monotonic() if step <= at else begin_s
            with (
                contextlib.suppress(KeyError, AssertionError)
                if one.goes_on
                else (contextlib.nullcontext())
            ):
                one.begin(model)
                with one.around():
                    loss = model(one.input()).square().mean()
                one.backward(loss)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    except BaseException as error:  # noqa: BLE001 (told to the test, Ctrl-C too)
        text = f"{type(error).__name__}: {error}"
    return text, losses, cases.own(model), time.monotonic() - begin_s


def ended(rank: int, ranks: int, way: type[Way]) -> tuple[str, float]:
    text, *_, seconds = trained(way, rank, ranks, True, way.at)
    return text, seconds


ENDED: dict[type[Way], str] = {
    LossFails: "KeyError",
    LossFailsAndGoesOn: "",
    NoBackward: "",
    GradientsHookFails: "KeyError",
    UnplannedBackwardFails: "KeyError",
    CheckFailsAndGoesOn: "",
    Evaluates: "",
    EvaluatesShards: "",
    Interrupted: "KeyboardInterrupt",
}
"""Way → the kind of the error that one rank has of its own; "": it has the others'."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDED)
def test_a_rank_does_something_else(way: type[Way], tmp_path: Path) -> None:
    found = processes.results(processes.run(ended, 2, tmp_path, way, timeout_s=TIMEOUT_S))
    (told, took_s), (own, own_s) = found
    assert told.startswith("RankError: ")
    assert max(took_s, own_s) < TIMEOUT_S + MARGIN_S
    if ENDED[way]:
        assert own.startswith(ENDED[way])
    else:
        assert own.startswith(("RankError: ", "ExecutionError: "))
    if way in (LossFailsAndGoesOn, NoBackward, Evaluates, EvaluatesShards):
        assert told == own
    if way is UnplannedBackwardFails:
        assert "rank 1 failed in the unplanned backward of a planned step: KeyError" in told
    if way is CheckFailsAndGoesOn:
        for text in (told, own):
            assert "rank 1 failed in the unplanned forward of a planned step: Assert" in text


def leaves() -> None:
    """A script, an error of whose own code ends rank 1 between forward and backward."""
    torch.distributed.init_process_group("gloo")
    model = memopt.shard(Checked(), init_device_mesh("cpu", (2,)))
    memopt.wrap(model, "min", "store-all", progress=False)
    for step in range(2):
        loss = model(torch.randn(64, 16)).sum()
        _raising() if step and torch.distributed.get_rank() else loss.backward()


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_with_its_own_error(tmp_path: Path) -> None:
    script = f"from {__name__} import leaves; leaves()"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "--no-python", sys.executable, "-c", script]
    own = {**os.environ, "MEMOPT_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=90)
    assert "RankError: another rank is gone" in done.stderr
    assert "Before that, rank 1 left with KeyError: 'here alone'" in done.stderr


_ALIKE: tuple[tuple[type[Way], int], ...]
_ALIKE = ((Retains, 0), (Hooked, 0), (Threads, 0), (AllChecksFail, AT), (OtherShapes, AT))


def alike(rank: int, ranks: int) -> dict[str, bool]:
    """Whether planned steps are the unplanned ones, for each way that a model takes unplanned."""
    found = {}
    for way, at in _ALIKE:
        expected, own = (trained(way, rank, ranks, planned, at) for planned in (False, True))
        same = expected[:2] == own[:2] and cases.same(expected[2], own[2])
        found[way.__name__] = same and not own[0]
    return found


@pytest.mark.slow
def test_what_a_rank_may_do_alone_changes_nothing(tmp_path: Path) -> None:
    for one in processes.results(processes.run(alike, 2, tmp_path)):
        assert all(one.values()), one
