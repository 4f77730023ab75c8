"""`memopt plan` and `memopt show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memopt
from memopt.api.plan import Plan, load
from memopt.commands import options
from memopt.commands.output import OptionError, plan_figures, say, say_json, say_written, value_of
from memopt.commands.targets import Sizes, load_target
from memopt.report.style import save_figure
from memopt.strategies.host_budget import parse_host_budget


@options.with_model_options
def plan(
    model: options.ModelOptions,
    budget: Annotated[
        str | None,
        typer.Option(help='Bytes, "6GiB", "6GB", a share such as 0.5, or min. Left out: no limit.'),
    ] = None,
    strategy: Annotated[str, typer.Option(help="See `memopt strategies`.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Save the plan here (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw its memory here (png, svg).")] = None,
    time_limit: options.TimeLimit = None,
    host_budget: Annotated[
        str | None, typer.Option(help='Most on the host at once: bytes or "6GiB"; 0: none.')
    ] = None,
) -> None:
    """Plan a model's training step within a memory budget."""
    limit = options.budget_of(budget)
    options.check_strategy(strategy)
    with value_of("--host-budget"):
        parse_host_budget(host_bytes := host_budget_of(host_budget))
    options.check_outputs({"--out": out, "--plot": plot})
    made = memopt.plan(
        **model.arguments(),
        budget=limit,
        strategy=strategy,
        time_limit_s=time_limit,
        host_budget=host_bytes,
    )
    if out is not None:
        made.save(out)
    if plot is not None:
        draw(made, "memory", plot)
    if model.as_json or not model.quiet:
        show_plan(made, model.as_json)
    if not model.silent:
        say_written(out, plot)


def show(
    file: Annotated[Path, typer.Argument(help="A file that `memopt plan --out` saved.")],
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here.")] = None,
    kind: Annotated[str, typer.Option(help="memory, schedule or timeline.")] = "memory",
    trace: Annotated[
        Path | None, typer.Option(help="Write the step here for ui.perfetto.dev (json).")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Run the planned model, too, and trace that beside it."),
    ] = None,
    batch: options.Batch = 4,
    sequence: options.Sequence = 128,
    dtype: options.DType = None,
    as_json: options.Json = False,
) -> None:
    """Show a saved plan, after checking it again."""
    if measure is not None and trace is None:
        raise OptionError("--measure traces a step: say where to, with --trace FILE.json")
    options.check_outputs({"--plot": plot, "--trace": trace}, read=file)
    options.check_dtype(dtype)
    saved = load(file)
    if plot is not None:
        draw(saved, kind, plot)
    if trace is not None and measure is not None:
        found = load_target(measure, Sizes(batch, sequence, dtype=dtype))
        saved.trace(trace, found.model, found.inputs, loss_fn=found.loss_fn)
    elif trace is not None:
        saved.trace(trace)
    show_plan(saved, as_json)
    if as_json:
        return
    if plot is not None:
        say(f"wrote {plot}: the {kind} of the plan")
    if trace is not None:
        steps = "predicted step" if measure is None else "predicted step and a measured one"
        say(f"wrote {trace}: the {steps}; open it at ui.perfetto.dev")


def host_budget_of(text: str | None) -> int | str | None:
    """Read a host budget as typed: whole numbers are bytes."""
    return int(text) if text is not None and text.isdecimal() else text


def show_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        say_json(plan_figures(plan))
    else:
        say(plan.summary())


def draw(plan: Plan, kind: str, path: Path) -> None:
    """Draw a plan to a file, without a window.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: an unknown kind of plot or file.
    """
    with value_of("--kind"):
        save_figure(lambda axes: plan.plot(kind, axes), path)
