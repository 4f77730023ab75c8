"""Options and arguments that several commands take, each described once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from memopt.commands.output import failures
from memopt.commands.targets import Sizes, load_target

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


def priced(
    name: str,
    device: str | None,
    mode: str,
    optimizer: str | None,
    cache: bool,
    batch: int,
    sequence: int,
) -> dict[str, Any]:
    """Arguments of `memopt.plan` and `memopt.profile`: the model of a name and how to price it."""
    # An estimate computes nothing, so the model needs no weights.
    found = load_target(name, Sizes(batch, sequence, meta=mode == "estimate"))
    return {
        "model": found.model,
        "inputs": found.inputs,
        "loss_fn": found.loss_fn,
        "device": device,
        "mode": mode,
        "optimizer": optimizer,
        "cache": cache,
    }


def reporting_failures(command: Callable[..., None]) -> Callable[..., None]:
    """The command, its errors turned into a message and an exit status (`failures`)."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        with failures(arguments.get("as_json", False)):
            command(**arguments)

    return run
