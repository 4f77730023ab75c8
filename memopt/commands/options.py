"""Options and arguments that several commands take, each described and checked once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from memopt.api.solving import planned_device
from memopt.commands.output import failures, value_of
from memopt.commands.targets import DTYPES, Sizes, load_target
from memopt.models.budget import MINIMUM, parse_budget
from memopt.models.optimizer_names import optimizer_name
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
    str | None, typer.Option(help="Link rates, or what to estimate for: H100, A100, V100...")
]
Mode = Annotated[
    str, typer.Option(help="measure: run the kernels here. estimate: price them for --device.")
]
Optimizer = Annotated[
    str | None, typer.Option(help="Charge its state: sgd, sgd-momentum, adamw, adamw-8bit...")
]
Cache = Annotated[bool, typer.Option(help="Keep measured costs of kernels on disk.")]
TimeLimit = Annotated[float | None, typer.Option(min=0.0, help="Seconds for the solver.")]


def priced(
    name: str,
    device: str | None,
    mode: str,
    optimizer: str | None,
    cache: bool,
    batch: int,
    sequence: int,
    dtype: str | None,
) -> dict[str, Any]:
    """Arguments of `memopt.plan` and its like: the model of a name and how to price it."""
    with value_of("--device" if mode in ("measure", "estimate") else "--mode"):
        planned_device(device, mode)  # type: ignore[arg-type]  # what it checks
    if optimizer is not None:
        with value_of("--optimizer"):
            optimizer_name(optimizer)
    check_dtype(dtype)
    # An estimate computes nothing, so the model needs no weights.
    found = load_target(name, Sizes(batch, sequence, meta=mode == "estimate", dtype=dtype))
    return {
        "model": found.model,
        "inputs": found.inputs,
        "loss_fn": found.loss_fn,
        "device": device,
        "mode": mode,
        "optimizer": optimizer,
        "cache": cache,
    }


def check_dtype(name: str | None) -> None:
    """Fail before the work, not after it."""
    with value_of("--dtype"):
        if name is not None and name not in DTYPES:
            raise ValueError(f"there is no {name!r} to train in; take {', '.join(DTYPES)}")


def budget_of(text: str | None) -> int | str | None:
    """A budget as typed: whole numbers are bytes. Fails before the work, not after it."""
    with value_of("--budget"):
        budget = int(text) if text is not None and text.isdecimal() else text
        parse_budget(None if budget == MINIMUM else budget, 1)
    return budget


def check_strategy(name: str) -> None:
    """Fail before the work, not after it."""
    with value_of("--strategy"):
        resolve(name)


def check_writable(option: str, path: Path | None) -> None:
    """Fail before the work, not after it."""
    with value_of(option):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def check_picture(path: Path | None) -> None:
    """Fail before the work if this file of --plot cannot be drawn.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        OptionError: no folder, or an ending that matplotlib does not write.
    """
    if path is None:
        return
    check_writable("--plot", path)
    from memopt.report.style import picture_types

    kinds = picture_types()
    with value_of("--plot"):
        if path.suffix[1:].lower() not in kinds:
            raise ValueError(
                f"cannot draw {path}: its name must end in one of {', '.join(sorted(kinds))}"
            )


def reporting_failures(command: Callable[..., None]) -> Callable[..., None]:
    """The command, its errors turned into a message and an exit status (`failures`)."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        with failures(arguments.get("as_json", False)):
            command(**arguments)

    return run
