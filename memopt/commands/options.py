"""Options and arguments that several commands take, each described and checked once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

import memopt
from memopt.api.cluster import with_adapters
from memopt.api.solving import planned_device
from memopt.commands.devices import chosen_device
from memopt.commands.output import OptionError, failures, value_of
from memopt.commands.targets import DTYPES, Sizes, load_target
from memopt.models import device as models
from memopt.models.budget import check_budget
from memopt.models.garbage import full_collections_deferred
from memopt.models.optimizer_names import optimizer_name
from memopt.models.options import parse_returns
from memopt.strategies import resolve

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="MODULE:FACTORY or FILE.py:FACTORY, FACTORY() returning (model, inputs) or "
        "(model, inputs, loss_fn); or hf:CONFIG.json.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size, for hf: models.")]
Sequence = Annotated[int, typer.Option(min=1, help="Tokens per sequence, for hf: models.")]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="bfloat16, float16 or float32. Left out: the one hf: models are configured with, a "
        "factory's own.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        "--gpu",
        help="Link rates, or what to estimate for: H100, RTX4090... (see `memopt device`).",
    ),
]
DeviceFile = Annotated[
    Path | None,
    typer.Option(help='JSON of a memopt.Device\'s fields; "like": "H100" gives the others.'),
]
Capacity = Annotated[
    str | None, typer.Option(help='The device\'s memory, if other than its own: "24GiB".')
]
Lora = Annotated[
    str | None,
    typer.Option(help="r=16: freeze the model, and train adapters of this rank beside it."),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", "--gpus", min=1, help="Devices over which it is spread, in an estimate."
    ),
]
Returns = Annotated[
    str, typer.Option(help="all, or loss: outputs that the loss does not read are not kept.")
]
Mode = Annotated[
    str | None,
    typer.Option(
        help="measure: run the kernels here. estimate: price them for --device.",
        show_default="estimate with --device or --device-file, else measure",
    ),
]
Optimizer = Annotated[
    str | None, typer.Option(help="Charge its state: sgd, sgd-momentum, adamw, adamw-8bit...")
]
Cache = Annotated[bool, typer.Option(help="Keep measured costs of kernels on disk.")]
TimeLimit = Annotated[float | None, typer.Option(min=0.0, help="Seconds for the solver.")]


_MOST_RANK = 2**16


@dataclass(frozen=True)
class ModelOptions:
    """The options shared by all commands that price a model's step."""

    model: Model
    device: Device = None
    mode: Mode = None
    optimizer: Optimizer = None
    batch: Batch = 4
    sequence: Sequence = 128
    dtype: DType = None
    cache: Cache = True
    as_json: Json = False
    quiet: Quiet = False
    device_file: DeviceFile = None
    capacity: Capacity = None
    lora: Lora = None
    returns: Returns = "all"
    ranks: Ranks = None

    @property
    def place(self) -> models.Device | str | None:
        """What `device=` takes."""
        return chosen_device(self.device, self.device_file, self.capacity)

    @property
    def how(self) -> Any:
        """The mode: as asked, or an estimate where a device is named."""
        named = self.device is not None or self.device_file is not None
        return self.mode or ("estimate" if named else "measure")

    @property
    def rank(self) -> int:
        """Rank of the adapters; 0: none."""
        return rank_of(self.lora)

    @property
    def silent(self) -> bool:
        """Whether to print nothing for people."""
        return self.as_json or self.quiet

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `memopt.plan` and its like: model, pricing and progress."""
        mode = self.how
        place = self.place
        with value_of("--device" if mode in ("measure", "estimate") else "--mode"):
            planned_device(place, mode)
        if self.optimizer is not None:
            with value_of("--optimizer"):
                optimizer_name(self.optimizer)
        check_dtype(self.dtype)
        with value_of("--returns"):
            returns = parse_returns(self.returns)
        # An estimate computes nothing, so the model needs no weights.
        sizes = Sizes(self.batch, self.sequence, meta=mode == "estimate", dtype=self.dtype)
        asked = (self.batch, self.sequence) != (Sizes.batch, Sizes.sequence)
        if asked and not self.model.startswith("hf:"):
            raise OptionError("--batch, --sequence: a factory chooses its own; name a hf: model")
        rank = self.rank
        found = load_target(self.model, sizes)
        arguments = {
            "model": with_adapters(found.model, rank) if rank else found.model,
            "inputs": found.inputs,
            "loss_fn": found.loss_fn,
            "device": place,
            "mode": mode,
            "optimizer": self.optimizer,
            "cache": self.cache,
            "progress": not self.silent,
            "returns": returns,
        }
        return _on_ranks(arguments, self.ranks)


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `ModelOptions` a signature that typer can read: the model, the
    command's own options, then the shared ones."""
    model, *others = inspect.signature(ModelOptions, eval_str=True).parameters.values()
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @wraps(command)
    def run(**given: Any) -> None:
        priced = {one.name: given.pop(one.name) for one in (model, *others)}
        command(ModelOptions(**priced), **given)

    vars(run)["__signature__"] = inspect.Signature([model, *own, *others])
    return run


def rank_of(text: str | None) -> int:
    """Read --lora: "r=16" or "16"; left out: 0."""
    with value_of("--lora"):
        if text is None:
            return 0
        number = text.strip().removeprefix("r=")
        if not number.isdecimal() or not 1 <= int(number) <= _MOST_RANK:
            raise ValueError(f"{text!r} is no rank of adapters: write r=16")
        return int(number)


def _on_ranks(arguments: dict[str, Any], ranks: int | None) -> dict[str, Any]:
    """Spread the model of these arguments over ranks that need not exist, by `memopt.shard`."""
    if ranks is None:
        return arguments
    with value_of("--ranks"):
        if arguments["mode"] != "estimate":
            raise ValueError(
                "asks about a cluster that is not there: name its device (--device H100)"
            )
    whole = arguments["model"]
    with value_of("--ranks"):
        mesh = memopt.Mesh(data=ranks)
    return arguments | {"model": lambda mesh: memopt.shard(whole, mesh), "mesh": mesh}


def check_dtype(name: str | None) -> None:
    """Fail before the work if --dtype is unknown."""
    with value_of("--dtype"):
        if name is not None and name not in DTYPES:
            raise ValueError(f"there is no {name!r} to train in; take {', '.join(DTYPES)}")


def budget_of(text: str | None) -> int | str | None:
    """Read a budget as typed: whole numbers are bytes. Fail before the work if it is unreadable."""
    with value_of("--budget"):
        budget = int(text) if text is not None and text.isdecimal() else text
        check_budget(budget)
    return budget


def check_strategy(name: str) -> None:
    """Fail before the work if --strategy is unknown."""
    with value_of("--strategy"):
        resolve(name)


def check_outputs(outputs: Mapping[str, Path | None], read: Path | None = None) -> None:
    """Fail before the work if a file cannot be written.

    Args:
        outputs: option → the file that it names.
        read: the file that the command reads, which none of them may be.

    Raises:
        ImportError: --plot, and matplotlib is missing; the message names the extra.
        OptionError: no folder or one that cannot be written in, a folder instead of a file, a file
            that is read or named twice, or an ending that matplotlib does not write.
    """
    taken = {} if read is None else {os.path.realpath(read): "it is the file that is read"}
    for option, path in outputs.items():
        if path is None:
            continue
        with value_of(option):
            if (why := taken.get(os.path.realpath(path)) or _unwritable(path)) is not None:
                raise ValueError(f"cannot write {path}: {why}")
        if path.is_file() or not path.exists():
            taken[os.path.realpath(path)] = f"{option} writes it"
        if option == "--plot":
            _check_picture(path)


def _unwritable(path: Path) -> str | None:
    """Say why a file cannot be written; None: nothing is known."""
    folder = path.absolute().parent
    if path.is_dir():
        return "it is a folder, no file; name another path"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    is_device = path.exists() and not path.is_file()
    return None if is_device or os.access(folder, os.W_OK) else f"{folder} may not be written in"


def _check_picture(path: Path) -> None:
    from memopt.report.style import picture_types

    kinds = picture_types()
    with value_of("--plot"):
        if path.suffix[1:].lower() not in kinds:
            raise ValueError(
                f"cannot draw {path}: its name must end in one of {', '.join(sorted(kinds))}"
            )


def reporting_failures(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that errors become a message and an exit status (`failures`)."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        with full_collections_deferred(), failures(arguments.get("as_json", False)):
            command(**arguments)

    return run
