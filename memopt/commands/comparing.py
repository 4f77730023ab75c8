"""`memopt compare`: several strategies at several budgets, side by side."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

import memopt
from memopt.api.comparison import Cell, Comparison
from memopt.commands import options
from memopt.commands.output import baseline_figures, say, say_json, say_written
from memopt.models.folders import write_whole
from memopt.report.style import save_figure


@options.with_model_options
def compare(
    model: options.ModelOptions,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help='As for `memopt plan`; once for each. Left out: five, from the smallest to "no '
            'plan needed".'
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="See `memopt strategies`; once for each. Left out: most of them."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run every plan, too, and measure peak and time.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Save the table here (Markdown).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time against memory here.")] = None,
    time_limit: options.TimeLimit = None,
) -> None:
    """Plan a model with several strategies at several budgets, in one table."""
    budgets = [options.budget_of(one) for one in budget or ()]
    for one in strategy or ():
        options.check_strategy(one)
    options.check_outputs({"--out": out, "--plot": plot})
    made = memopt.compare(
        **model.arguments(),
        budgets=budgets or None,
        strategies=strategy or None,
        run=run,
        time_limit_s=time_limit,
    )
    if out is not None:
        write_whole(out, (made.to_markdown() + "\n").encode())
    if plot is not None:
        save_figure(made.plot, plot)
    if model.as_json:
        say_json(_figures(made))
    elif not model.quiet:
        say(str(made))
        say_written(out, plot)


def _figures(made: Comparison) -> dict[str, Any]:
    """Return a comparison's figures for machines: bytes and seconds."""
    names = [one.name for one in fields(Cell) if one.name != "plan"]
    measured = made.measured_baseline
    return {
        "baseline": baseline_figures(made.baseline),
        "measured_baseline": None if measured is None else baseline_figures(measured),
        "compute_time_s": made.compute_time_s,
        "complete": made.complete,
        "cells": [
            {name: getattr(cell, name) for name in names} | {"status": cell.status.value}
            for cell in made.cells
        ],
    }
