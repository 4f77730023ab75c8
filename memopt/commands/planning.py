"""`memopt plan` and `memopt show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memopt
from memopt.api.plan import Plan, load
from memopt.commands import options
from memopt.commands.output import plan_figures, say, say_json
from memopt.commands.targets import Sizes, load_target


def plan(
    model: options.Model,
    budget: Annotated[
        str | None,
        typer.Option(help='Bytes, "6GiB", "6GB", a share such as 0.5, or min. Left out: no limit.'),
    ] = None,
    strategy: Annotated[str, typer.Option(help="See `memopt strategies`.")] = "rotor",
    out: Annotated[Path | None, typer.Option(help="Save the plan here (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw its memory here (png, svg).")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the solver.")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help='Most on the host at once: bytes or "6GiB"; 0: none.')
    ] = None,
    device: options.Device = None,
    mode: options.Mode = "measure",
    optimizer: options.Optimizer = None,
    batch: options.Batch = 4,
    sequence: options.Sequence = 128,
    cache: options.Cache = True,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan a model's training step within a memory budget."""
    limit = read_budget(budget)
    check_writable(out)
    check_picture(plot)
    made = memopt.plan(
        **options.priced(model, device, mode, optimizer, cache, batch, sequence),
        budget=limit,
        strategy=strategy,
        time_limit_s=time_limit,
        host_budget=int(host_budget) if host_budget and host_budget.isdigit() else host_budget,
        progress=not (as_json or quiet),
    )
    if out is not None:
        made.save(out)
    if plot is not None:
        draw(made, "memory", plot)
    if as_json or not quiet:
        show_plan(made, as_json)
    if not (as_json or quiet):
        for path in (out, plot):
            if path is not None:
                say(f"wrote {path}")


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
    as_json: options.Json = False,
) -> None:
    """Show a saved plan, after checking it again."""
    if measure is not None and trace is None:
        raise ValueError("--measure traces a step: say where to, with --trace FILE.json")
    check_picture(plot)
    check_writable(trace)
    saved = load(file)
    if plot is not None:
        draw(saved, kind, plot)
    if trace is not None and measure is not None:
        found = load_target(measure, Sizes(batch, sequence))
        saved.trace(trace, found.model, found.inputs, loss_fn=found.loss_fn)
    elif trace is not None:
        saved.trace(trace)
    show_plan(saved, as_json)


def read_budget(text: str | None) -> int | float | str | None:
    """A budget as typed: whole numbers are bytes, others shares, the rest units or "min"."""
    for kind in (int, float):
        try:
            return None if text is None else kind(text)
        except ValueError:
            pass
    return text


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
    from memopt.report.style import new_figure

    figure, axes = new_figure()
    plan.plot(kind, axes)
    figure.savefig(path, dpi=150)


def check_writable(path: Path | None) -> None:
    """Fail before the work, not after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def check_picture(path: Path | None) -> None:
    """Fail before the work if this file cannot be drawn.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: no folder, or an ending that matplotlib does not write.
    """
    if path is None:
        return
    check_writable(path)
    from memopt.report.style import picture_types

    kinds = picture_types()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(
            f"cannot draw {path}: its name must end in one of {', '.join(sorted(kinds))}"
        )
