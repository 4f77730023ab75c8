"""`memopt explore`: a page that explains a model's plans, or a saved one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import memopt
from memopt.api.plan import load
from memopt.commands import options
from memopt.commands.output import OptionError, say_written
from memopt.report.snapshot import write_snapshot

DEFAULT = ("auto", "store-all")


def explore(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A model, as for `memopt plan`, or a file that `memopt plan --out` saved.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the page here (html).")] = Path("report.html"),
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="See `memopt strategies`; once for each. Left out: auto, store-all."),
    ] = None,
    points: Annotated[
        int, typer.Option(min=2, help="Plans per strategy, the stops of the budget slider.")
    ] = 10,
    csv: Annotated[Path | None, typer.Option(help="Write the curve here (csv).")] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write the opened plan's memory here for pytorch.org/memory_viz."),
    ] = None,
    time_limit: options.TimeLimit = None,
    device: options.Device = None,
    mode: options.Mode = None,
    optimizer: options.Optimizer = None,
    batch: options.Batch = 4,
    sequence: options.Sequence = 128,
    dtype: options.DType = None,
    cache: options.Cache = True,
    quiet: options.Quiet = False,
    device_file: options.DeviceFile = None,
    capacity: options.Capacity = None,
    lora: options.Lora = None,
    returns: options.Returns = "all",
    ranks: options.Ranks = None,
) -> None:
    """Write one HTML page that explains a model's plans: curve, memory, streams, modules."""
    written = {"--out": out, "--csv": csv, "--snapshot": snapshot}
    options.check_outputs(written, read=Path(target))
    for name in strategy or ():
        options.check_strategy(name)
    if Path(target).is_file() and not target.endswith(".py"):
        if csv is not None:
            raise OptionError("--csv writes the curve of a model; a saved plan has none")
        page = load(target).report(out, points=points, progress=not quiet)
    else:
        sizes = (optimizer, batch, sequence, dtype, cache)
        priced = options.ModelOptions(target, device, mode, *sizes, quiet=quiet)
        priced = replace(priced, device_file=device_file, capacity=capacity, lora=lora)
        priced = replace(priced, returns=returns, ranks=ranks)
        asked = {**priced.arguments(), "strategies": strategy or DEFAULT}
        made = memopt.curve(**asked, points=points, time_limit_s=time_limit)
        page = made.report(out)
        if csv is not None:
            made.to_csv(csv)
    if snapshot is not None:
        opened = page.subject.opened
        write_snapshot(snapshot, opened.graph, opened.program, opened.device)
    say_written(*(() if quiet else written.values()))
