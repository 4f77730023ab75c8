"""`memopt plan` and `memopt show`."""

from __future__ import annotations

from pathlib import Path

import memopt
from memopt.api.plan import Plan, load
from memopt.commands.output import plan_figures, say, say_json
from memopt.commands.profiling import Profiling
from memopt.commands.target import Sizes
from memopt.commands.targets import load_target


def plan_command(
    target: str,
    *,
    budget: str | None,
    strategy: str,
    out: Path | None,
    picture: Path | None,
    time_limit_s: float | None,
    host_budget: str | None = None,
    how: Profiling,
    sizes: tuple[int, int],
    as_json: bool,
    quiet: bool,
) -> None:
    """See `memopt.cli.plan`."""
    limit = read_budget(budget)
    check_writable(out)
    check_picture(picture)
    found = load_target(target, Sizes(*sizes, meta=how.estimates))
    made = memopt.plan(
        found.model,
        found.inputs,
        budget=limit,
        strategy=strategy,
        loss_fn=found.loss_fn,
        time_limit_s=time_limit_s,
        host_budget=int(host_budget) if host_budget and host_budget.isdigit() else host_budget,
        **how.arguments(),
        progress=not (as_json or quiet),
    )
    if out is not None:
        made.save(out)
    if picture is not None:
        draw(made, "memory", picture)
    if not quiet or as_json:
        show_plan(made, as_json=as_json)
        if not as_json:
            for path in (out, picture):
                if path is not None:
                    say(f"wrote {path}")


def show_command(
    file: Path,
    *,
    picture: Path | None,
    kind: str,
    trace: Path | None,
    measure: str | None,
    sizes: tuple[int, int],
    as_json: bool,
) -> None:
    """See `memopt.cli.show`.

    Raises:
        ValueError: a model to measure, and no trace to write.
    """
    if measure is not None and trace is None:
        raise ValueError("--measure traces a step: say where to, with --trace FILE.json")
    check_picture(picture)
    check_writable(trace)
    plan = load(file)
    if picture is not None:
        draw(plan, kind, picture)
    if trace is not None and measure is not None:
        found = load_target(measure, Sizes(*sizes))
        plan.trace(trace, found.model, found.inputs, loss_fn=found.loss_fn)
    elif trace is not None:
        plan.trace(trace)
    show_plan(plan, as_json=as_json)


def read_budget(text: str | None) -> int | float | str | None:
    """A budget as typed: whole numbers are bytes, others shares, the rest units or "min"."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def show_plan(plan: Plan, *, as_json: bool) -> None:
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
