"""`memopt fits`: whether a model trains on a device, or on many of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

import memopt
from memopt.api.fits import DEFAULT_STRATEGIES, Fits
from memopt.commands import options
from memopt.commands.output import say, say_json, value_of


@options.with_model_options
def fits(
    model: options.ModelOptions,
    budget: Annotated[
        str | None, typer.Option(help='Bytes or "60GiB". Left out: the device\'s capacity.')
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="See `memopt strategies`; may be given several times.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Devices over which memopt.shard spreads it, in an estimate."),
    ] = None,
) -> None:
    """Say whether a model trains on a device, with which strategy and how slowly."""
    limit = options.budget_of(budget)
    if model.mode is None and model.device is not None:
        model = replace(model, mode="estimate")
    for name in strategy or ():
        options.check_strategy(name)
    with value_of("--ranks"):
        if ranks is not None and model.mode != "estimate":
            raise ValueError(
                "asks about a cluster that is not there: name its device (--device H100)"
            )
    arguments = model.arguments()
    del arguments["cache"]
    if ranks is not None:
        whole = arguments["model"]
        arguments["model"] = lambda mesh: memopt.shard(whole, mesh)
        arguments["mesh"] = memopt.Mesh(data=ranks)
    found = memopt.fits(**arguments, budget=limit, strategies=tuple(strategy or DEFAULT_STRATEGIES))
    if model.as_json:
        say_json(_figures(found))
    elif not model.quiet:
        say(str(found))


def _figures(found: Fits) -> dict[str, object]:
    return {
        "device": found.device.name,
        "budget_bytes": found.budget_bytes,
        "standing_bytes": dict(found.standing),
        "rows": [asdict(row) for row in found.rows],
        "notes": found.notes,
    }
