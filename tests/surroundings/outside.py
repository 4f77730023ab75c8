"""Output, files, threads, the process: what a forward tells the world outside Python's objects."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.surroundings.situation import MODULE_WAYS, Net, Setting, situation

LOG = logging.getLogger("surroundings")
FOLDER = Path(tempfile.gettempdir()) / f"memopt-surroundings-{os.getpid()}"
SCALARS: list[Any] = []


class Prints(Net):
    def touch(self, h: Tensor) -> Tensor:
        print("hidden", tuple(h.shape))
        return h


@situation("print", "print", quick=True, says=True)
def _() -> Setting:
    return Setting(Prints())


class PrintsValues(Net):
    def touch(self, h: Tensor) -> Tensor:
        print(f"mean {h.detach().mean().item():.4f}")
        return h


@situation("print of a value", "print|item", says=True)
def _() -> Setting:
    return Setting(PrintsValues())


class Logs(Net):
    def touch(self, h: Tensor) -> Tensor:
        LOG.warning("surroundings: hidden %s", tuple(h.shape))
        return h


@situation("logging", "LOG|logging|warning", says=True)
def _() -> Setting:
    return Setting(Logs())


class Writer:
    """As TensorBoard's."""

    def __init__(self) -> None:
        self.step = 0

    def add_scalar(self, name: str, value: Tensor) -> None:
        SCALARS.append((self.step, name, float(value)))
        self.step += 1


class Scalars(Net):
    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()

    def touch(self, h: Tensor) -> Tensor:
        self.writer.add_scalar("mean", h.detach().mean())
        return h


@situation("a writer of scalars", r"item|float|add_scalar|SCALARS|writer")
def _() -> Setting:
    SCALARS.clear()
    model = Scalars()
    return Setting(model, lambda: [SCALARS, model.writer.step])


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(FOLDER.glob("*"))}


def emptied() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*"):
        path.unlink()


class Appends(Net):
    def touch(self, h: Tensor) -> Tensor:
        with open(FOLDER / "shapes.txt", "a") as file:
            file.write(f"{tuple(h.shape)}\n")
        return h


@situation("a file is appended to", "open|file|FOLDER", quick=True)
def _() -> Setting:
    emptied()
    return Setting(Appends(), files)


class SavesTensor(Net):
    def touch(self, h: Tensor) -> Tensor:
        (FOLDER / "hidden.pkl").write_bytes(pickle.dumps(h.detach().tolist()))
        return h


@situation("a tensor is written to a file", "item|tolist|dumps|file|FOLDER|write_bytes")
def _() -> Setting:
    emptied()
    return Setting(SavesTensor(), files)


class InEnvironment(Net):
    def touch(self, h: Tensor) -> Tensor:
        count = int(os.environ.get("SURROUNDINGS", "0")) + 1
        os.environ["SURROUNDINGS"] = str(count)
        return h * count


@situation("an environment variable counts", "environ|SURROUNDINGS")
def _() -> Setting:
    os.environ["SURROUNDINGS"] = "0"
    return Setting(InEnvironment(), lambda: os.environ["SURROUNDINGS"])


@situation("an environment variable is read", "environ|SURROUNDINGS")
def _() -> Setting:
    class Reads(Net):
        def touch(self, h: Tensor) -> Tensor:
            return h * int(os.environ["SURROUNDINGS"])

    os.environ["SURROUNDINGS"] = "1"

    def after(step: int) -> None:
        os.environ["SURROUNDINGS"] = str(step + 2)

    return Setting(Reads(), after=after)


@situation(
    "os.getenv finds no variable",
    "environ|SURROUNDINGS",
    quick=True,
    torchs="Dynamo guards no key that is missing, and nothing of the standard library's",
)
def _() -> Setting:
    class Looks(Net):
        def touch(self, h: Tensor) -> Tensor:
            return h * int(os.getenv("SURROUNDINGS", "5"))

    os.environ.pop("SURROUNDINGS", None)

    def after(step: int) -> None:
        os.environ["SURROUNDINGS"] = str(step + 2)

    return Setting(Looks(), after=after)


class StartsThread(Net):
    def touch(self, h: Tensor) -> Tensor:
        thread = threading.Thread(target=SCALARS.append, args=(tuple(h.shape),))
        thread.start()
        thread.join()
        return h


@situation("the forward starts a thread", "[Tt]hread|SCALARS")
def _() -> Setting:
    SCALARS.clear()
    return Setting(StartsThread(), lambda: SCALARS)


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.entries = [0]

    def touch(self, h: Tensor) -> Tensor:
        with self.lock:
            self.entries[0] += 1
        return h


@situation("a lock around a counter", "lock|entries|Lock")
def _() -> Setting:
    model = Locked()
    return Setting(model, lambda: model.entries)


@situation("batches from a worker thread", "[Tt]hread|input", exact=MODULE_WAYS)
def _() -> Setting:
    class Shifted(Net):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    loader = DataLoader(torch.arange(24.0).view(4, 6) / 24, batch_size=1, pin_memory=False)
    shifts = list(loader)
    found: list[Tensor] = []

    def inputs(step: int) -> tuple[Tensor]:
        thread = threading.Thread(target=lambda: found.append(shifts[step % 4] * 2))
        thread.start()
        thread.join()
        return (found[-1],)

    return Setting(Shifted(), inputs=inputs)


@situation(
    "another thread trains another model meanwhile",
    "[Tt]hread",
    ways=MODULE_WAYS,
    exact=("plan", "wrap"),
)
def _() -> Setting:
    model, other = Net(), Net()
    losses: list[float] = []

    def work() -> None:
        loss = other(torch.ones(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())

    def between(_step: int) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return Setting(model, lambda: losses, between=between, owned=(other,))


class Collecting(Net):
    def touch(self, h: Tensor) -> Tensor:
        gc.collect()
        return h


@situation("gc.collect in the forward", "gc|collect")
def _() -> Setting:
    return Setting(Collecting())


class Asserts(Net):
    def touch(self, h: Tensor) -> Tensor:
        assert torch.isfinite(h).all(), "surroundings: not finite"
        return h


@situation("an assertion on values", "isfinite|assert|value", exact=())
def _() -> Setting:
    return Setting(Asserts())


class Branches(Net):
    def touch(self, h: Tensor) -> Tensor:
        if h.abs().max().item() > 1e9:
            return h / 2
        return h


@situation("a check for overflow", "item")
def _() -> Setting:
    return Setting(Branches())


class BranchesInLoop(Net):
    def __init__(self) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + block(h)
            if h.abs().max().item() > 1e9:
                h = h / 2
        y: Tensor = self.last(h)
        return y


@situation("a check for overflow in a loop over blocks", "item", quick=True)
def _() -> Setting:
    return Setting(BranchesInLoop())


class Caught(Net):
    def touch(self, h: Tensor) -> Tensor:
        try:
            raise ValueError("surroundings")
        except ValueError as error:
            SCALARS.append(str(error))
        return h


@situation("an exception is caught and noted", "SCALARS")
def _() -> Setting:
    SCALARS.clear()
    return Setting(Caught(), lambda: SCALARS)


class Averages(Net):
    def __init__(self) -> None:
        super().__init__()
        self.average = 0.0

    def touch(self, h: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * h.detach().mean().item()
        return h


@situation("a float average of values", "average|item")
def _() -> Setting:
    return Setting(Averages())


class ToNumpy(Net):
    def touch(self, h: Tensor) -> Tensor:
        SCALARS.append(h.detach().numpy().copy())
        return h


@situation("activations go to NumPy", "SCALARS|numpy")
def _() -> Setting:
    SCALARS.clear()
    return Setting(ToNumpy(), lambda: SCALARS)
